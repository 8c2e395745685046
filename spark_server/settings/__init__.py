"""Settings of the server: one definition for flags, environment and TOML file.

Reads the environment once and hands frozen values down; imports no torch.
"""

from spark_server.settings.fields import (
    AuthSettings,
    BatchingSettings,
    LimitsSettings,
    LoggingSettings,
    MemorySettings,
    ModelSettings,
    ServerSettings,
)
from spark_server.settings.prefix_cache import PrefixCacheSettings
from spark_server.settings.sources import LoadedSettings, Settings, load_settings, read_api_keys
from spark_server.settings.speculation import SpeculationSettings
from spark_server.settings.watchdogs import WatchdogSettings

__all__ = [
    "AuthSettings",
    "BatchingSettings",
    "LimitsSettings",
    "LoadedSettings",
    "LoggingSettings",
    "MemorySettings",
    "ModelSettings",
    "PrefixCacheSettings",
    "ServerSettings",
    "Settings",
    "SpeculationSettings",
    "WatchdogSettings",
    "load_settings",
    "read_api_keys",
]
