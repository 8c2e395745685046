"""The settings of the prefix cache: names, defaults, spellings and help.

Knows nothing of where values come from and nothing of what is cached.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from engine.reserve.ssm_reserve import (
    MarconiSlotDecision,
    marconi_snapshot_slots_with,
    prefix_caching_active,
)
from spark_server.settings.knobs import Knob, Presence, SettingsGroup


class PrefixCacheSettings(SettingsGroup):
    """What requests reuse of the prompts and answers before them."""

    enable_prefix_caching: Annotated[
        bool,
        Knob(
            "Reuse KV and recurrent state of prefixes that earlier requests computed",
            ("--enable-prefix-caching",),
            ("SPARK_ENABLE_PREFIX_CACHING",),
        ),
    ] = True
    ssm_cache_slots: Annotated[
        int,
        Knob(
            "Recurrent states that are kept for it, each as large as that of one sequence; "
            "0 keeps none, so that nothing is reused",
            ("--ssm-cache-slots",),
            ("SPARK_SSM_CACHE_SLOTS",),
            "N",
        ),
    ] = Field(default=16, ge=0, le=65536)
    prefix_cache_exact: Annotated[
        bool,
        Knob(
            "Reuse only what gives the very tokens that computing anew gives; off, answers are "
            "reused too where decode steps round differently from prompts",
            ("--prefix-cache-exact",),
            ("SPARK_PREFIX_CACHE_EXACT",),
        ),
    ] = True
    ssm_marconi_full: Annotated[
        Presence,
        Knob(
            "Presence: reserve the states of --ssm-cache-slots also when nothing is cached",
            env=("ATLAS_SSM_MARCONI_FULL",),
        ),
    ] = False

    @property
    def active(self) -> bool:
        """Whether prefixes are reused; the states of all served models can be restored."""
        return prefix_caching_active(self.enable_prefix_caching, True) and self.ssm_cache_slots > 0

    @property
    def slots(self) -> MarconiSlotDecision:
        """States to reserve."""
        return marconi_snapshot_slots_with(self.ssm_cache_slots, self.active, self.ssm_marconi_full)
