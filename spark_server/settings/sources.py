"""Layers flags over the environment over a TOML file, and says where each value came from.

Knows the spellings that `fields` lists and nothing of what the values do.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from engine.config import GRID
from engine.errors import ConfigError
from spark_server.settings.fields import (
    GROUPS,
    AuthSettings,
    BatchingSettings,
    LimitsSettings,
    LoggingSettings,
    MemorySettings,
    ModelSettings,
    ServerSettings,
    all_settings,
)
from spark_server.settings.parser import parse_flags
from spark_server.settings.prefix_cache import PrefixCacheSettings
from spark_server.settings.speculation import SpeculationSettings, check_together
from spark_server.settings.watchdogs import WatchdogSettings, check_watchdogs

_PREFIXES = ("ATLAS_", "METRALE_", "SPARK_")
# Read beside the fields: the settings file itself.
_OTHER_ENV = frozenset({"SPARK_CONFIG"})


class Settings(BaseSettings):
    """Every setting, validated and frozen; built by `load_settings` only."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: ModelSettings = ModelSettings()
    server: ServerSettings = ServerSettings()
    batching: BatchingSettings = BatchingSettings()
    memory: MemorySettings = MemorySettings()
    limits: LimitsSettings = LimitsSettings()
    speculation: SpeculationSettings = SpeculationSettings()
    prefix_cache: PrefixCacheSettings = PrefixCacheSettings()
    watchdogs: WatchdogSettings = WatchdogSettings()
    auth: AuthSettings = AuthSettings()
    logging: LoggingSettings = LoggingSettings()


@dataclass(slots=True)
class _Layer:
    """Raw values by path with the spelling that set each."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def put(self, path: str, value: Any, origin: str) -> None:
        self.values[path] = value
        self.origins[path] = origin

    def drop(self, path: str) -> None:
        self.values.pop(path, None)
        self.origins.pop(path, None)


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """The settings, where each one that is not a default came from, and lines for the log.

    Attributes:
        origins: path (`server.port`) to spelling (`--port`, `SPARK_PORT`, `spark.toml`).
        warnings: sentences that the user should read, e.g. an unknown environment name.
        notes: sentences on values that were adjusted.
    """

    settings: Settings
    origins: Mapping[str, str]
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class _LayerSource(PydanticBaseSettingsSource):
    """One layer in the shape that pydantic-settings merges."""

    def __init__(self, settings_cls: type[BaseSettings], layer: _Layer) -> None:
        super().__init__(settings_cls)
        self._layer = layer

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        return self().get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        nested: dict[str, Any] = {}
        for path, value in self._layer.values.items():
            group, name = path.split(".")
            nested.setdefault(group, {})[name] = value
        return nested


def load_settings(
    argv: Sequence[str] = (), environ: Mapping[str, str] | None = None, *, prog: str = "serve"
) -> LoadedSettings:
    """Read all layers once: flag over environment over file over default.

    Args:
        argv: the words after the program's name.
        environ: the environment; the process's own by default.

    Raises:
        ConfigError: an unknown, invalid or contradictory setting, in one line.
        SystemExit: after --help or --version.
    """
    environ = os.environ if environ is None else environ
    raw, config = parse_flags(argv, prog)
    flags = _Layer()
    spelled = {s.path: s.knob.flags[0] for s in all_settings() if s.knob.flags}
    for path, value in raw.items():
        flags.put(path, value, spelled[path])
    warnings: list[str] = []
    env = _environment(environ, warnings)
    config = config or environ.get("SPARK_CONFIG")
    layers = [flags, env, _file(config) if config else _Layer()]
    _one_memory_limit(layers)
    origins: dict[str, str] = {}
    for layer in reversed(layers):
        origins.update(layer.origins)
    settings = _validate(layers, origins)
    _refuse_unbuilt(settings, origins, warnings)
    warnings.extend(check_together(settings.speculation, origins))
    warnings.extend(check_watchdogs(settings.watchdogs, origins))
    _check_keys(settings, origins)
    return LoadedSettings(settings, origins, tuple(warnings), _notes(settings))


def _environment(environ: Mapping[str, str], warnings: list[str]) -> _Layer:
    layer = _Layer()
    known = set(_OTHER_ENV)
    for setting in all_settings():
        names = list(_with_aliases(setting.knob.env))
        known.update(names)
        given = {name: environ[name] for name in names if name in environ}
        if len(set(given.values())) > 1:
            shown = " but ".join(
                name if setting.knob.secret else f"{name}={value}" for name, value in given.items()
            )
            raise ConfigError(f"{shown}; these are one setting, set only one of them")
        if given:
            name, value = next(iter(given.items()))
            layer.put(setting.path, value, name)
    for name in sorted(environ):
        if name.startswith(_PREFIXES) and name not in known:
            close = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f", did you mean {close[0]}" if close else ""
            warnings.append(f"Environment variable {name} is no setting and is ignored{hint}")
    return layer


def _with_aliases(names: Iterable[str]) -> Iterable[str]:
    """The seeds' newer pages say METRALE_ where the older say ATLAS_; both are read."""
    for name in names:
        yield name
        if name.startswith("ATLAS_"):
            yield "METRALE_" + name.removeprefix("ATLAS_")


def _file(path: str) -> _Layer:
    try:
        with Path(path).open("rb") as stream:
            tables = tomllib.load(stream)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not valid TOML, {error}") from None
    layer = _Layer()
    for group, table in tables.items():
        if group not in GROUPS:
            raise ConfigError(
                f"{path}: [{group}] is no table of settings; there are {', '.join(GROUPS)}"
            )
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {group} must be a table, write [{group}]")
        for name, value in table.items():
            if name not in GROUPS[group].model_fields:
                close = difflib.get_close_matches(name, GROUPS[group].model_fields, n=1)
                hint = f", did you mean {close[0]}" if close else ""
                raise ConfigError(f"{path}: [{group}] {name} is no setting{hint}")
            layer.put(f"{group}.{name}", value, f"{path}: [{group}] {name}")
    return layer


def _one_memory_limit(layers: Sequence[_Layer]) -> None:
    """A budget and a share exclude each other: the higher layer wins, no layer may say both."""
    share, budget = "memory.gpu_memory_utilization", "memory.memory_budget"
    for index, layer in enumerate(layers):
        if share in layer.values and budget in layer.values:
            raise ConfigError(
                f"{layer.origins[budget]} and {layer.origins[share]} contradict each other; "
                "give only one of them"
            )
        for given, other in ((share, budget), (budget, share)):
            if given in layer.values:
                for lower in layers[index + 1 :]:
                    lower.drop(other)


def _validate(layers: Sequence[_Layer], origins: Mapping[str, str]) -> Settings:
    class Layered(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return tuple(_LayerSource(settings_cls, layer) for layer in layers)

    try:
        return Layered()
    except ValidationError as error:
        raise ConfigError(_first_error(error, origins)) from None


def _first_error(error: ValidationError, origins: Mapping[str, str]) -> str:
    first = error.errors(include_url=False)[0]
    path = ".".join(str(part) for part in first["loc"][:2])
    setting = next((s for s in all_settings() if s.path == path), None)
    cause = first.get("ctx", {}).get("error")
    text = str(cause) if isinstance(cause, Exception) else str(first["msg"])
    text = text.replace("Input should", "should", 1)
    secret = setting is not None and setting.knob.secret
    shown = "" if secret or isinstance(cause, Exception) else f", got {first['input']!r}"
    auto = setting is not None and setting.default is None and setting.knob.auto
    return f"{origins.get(path, path)} {text}{' or auto' if auto and not cause else ''}{shown}"


def _refuse_unbuilt(settings: Settings, origins: Mapping[str, str], warnings: list[str]) -> None:
    for setting in all_settings():
        origin = origins.get(setting.path)
        if setting.knob.built or origin is None:
            continue
        if origin.startswith(("ATLAS_", "METRALE_")):
            warnings.append(f"{origin} has no effect, what it switches is not built yet")
        elif getattr(getattr(settings, setting.group), setting.name) != setting.default:
            raise ConfigError(f"{origin} is not available in this version of Spark; remove it")


def _check_keys(settings: Settings, origins: Mapping[str, str]) -> None:
    for key in settings.auth.api_key:
        if not usable_key(key.get_secret_value()):
            origin = origins["auth.api_key"]
            raise ConfigError(f"{origin} has an empty key or one with spaces or non-ASCII letters")


def usable_key(key: str) -> bool:
    """Whether a key can travel in an HTTP header as it is."""
    return bool(key) and key.isascii() and key.isprintable() and " " not in key


def _notes(settings: Settings) -> tuple[str, ...]:
    asked = settings.batching.max_prefill_tokens
    if asked % GRID == 0:
        return ()
    return (
        f"max-prefill-tokens {asked} is rounded down to {asked - asked % GRID}, "
        f"a multiple of {GRID}",
    )


def read_api_keys(auth: AuthSettings) -> frozenset[str]:
    """All keys, of the settings and of the key file; empty when nobody needs one.

    Raises:
        ConfigError: the file cannot be read, has no key, or one that no client can send.
    """
    keys = {key.get_secret_value() for key in auth.api_key}
    if auth.api_key_file is None:
        return frozenset(keys)
    try:
        text = Path(auth.api_key_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise ConfigError(f"--api-key-file {auth.api_key_file}: {reason}") from None
    lines = [line.strip() for line in text.splitlines()]
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise ConfigError(f"--api-key-file {auth.api_key_file} holds no key; add one per line")
    bad = [number for number, line in enumerate(lines, 1) if line in found and not usable_key(line)]
    if bad:
        raise ConfigError(
            f"--api-key-file {auth.api_key_file} line {bad[0]}: "
            "a key may not hold spaces or non-ASCII letters"
        )
    return frozenset(keys | set(found))
