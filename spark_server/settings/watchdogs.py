"""The settings of the watchdogs and of the ring that lets them roll back.

Knows nothing of models; who decides the ring's depth is in `engine.reserve.decode_ring`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from engine.errors import ConfigError
from engine.reserve.decode_ring import parse_decode_ring_slots, watchdogs_disabled_from_value
from spark_server.settings.knobs import Knob, SettingsGroup


def _depth(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return parse_decode_ring_slots(value.strip().lower())
    except ConfigError:
        raise ValueError(f"is {value!r}; use auto or a depth of 0 to 8") from None


class WatchdogSettings(SettingsGroup):
    """What is done about output that repeats itself."""

    watchdogs: Annotated[
        Literal["on", "off"],
        Knob(
            "Watch for output that goes in circles: go back to where it began and continue "
            "differently, or end what was already streamed; changes output",
            ("--watchdogs",),
            ("SPARK_WATCHDOGS",),
        ),
    ] = "off"
    ssm_decode_ring_slots: Annotated[
        int | None,
        Knob(
            "Snapshots of recurrent state per sequence that a rollback can go back to, 0 to 8",
            ("--ssm-decode-ring-slots",),
            ("SPARK_SSM_DECODE_RING_SLOTS",),
            "N",
            auto="0 without watchdogs or with --speculative, else the deepest of 8, 4, 2, 1 that "
            "fits beside the weights",
        ),
        BeforeValidator(_depth),
    ] = Field(default=None, ge=0, le=8)
    ssm_decode_ring: Annotated[
        str | None,
        Knob(
            "For ssm-decode-ring-slots auto: 1 is 8 or what fits, 0 is none; other values change "
            "nothing",
            env=("ATLAS_SSM_DECODE_RING",),
        ),
    ] = None
    disable_watchdogs: Annotated[
        str | None,
        Knob(
            "1 or true is --watchdogs off, whatever else is set; other values change nothing",
            env=("ATLAS_DISABLE_WATCHDOGS",),
        ),
    ] = None

    @property
    def enabled(self) -> bool:
        """Whether anything is watched."""
        return self.watchdogs == "on" and not watchdogs_disabled_from_value(self.disable_watchdogs)


def check_watchdogs(settings: WatchdogSettings, origins: Mapping[str, str]) -> Iterator[str]:
    """Warnings on what was given and does not count, each once.

    Args:
        origins: path (`watchdogs.ssm_decode_ring`) to spelling (`ATLAS_SSM_DECODE_RING`).
    """
    asked = origins.get("watchdogs.watchdogs")
    if settings.watchdogs == "on" and not settings.enabled and asked is not None:
        yield f"{origins['watchdogs.disable_watchdogs']} switches off what {asked} asks for"
    if settings.ssm_decode_ring is not None and settings.ssm_decode_ring not in ("0", "1"):
        yield (
            f"{origins['watchdogs.ssm_decode_ring']}={settings.ssm_decode_ring!r} is neither 0 "
            "nor 1 and changes nothing"
        )
