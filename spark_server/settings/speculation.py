"""The settings of speculation, and what they come to together.

The seeds' environment variables have no flags; knows nothing of models or slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from engine.errors import ConfigError
from engine.reserve.ssm_reserve import SsmRollbackMode
from engine.speculation.dcut import DCUT_MAX_SEQS
from engine.speculation.policy import ControllerMode, PolicySettings
from spark_server.settings.knobs import Knob, Presence, SettingsGroup

# A verify has a row more than drafts. Eight rows let a dozen sequences share the 96 rows of one
# forward; deeper drafts of a one-layer drafter hardly ever survive.
MAX_NUM_DRAFTS = 7
_PINNED = "v2"
_PROTOCOLS = ("", "v1", _PINNED)


def _verifiable(drafts: int) -> int:
    if not 1 <= drafts <= MAX_NUM_DRAFTS:
        raise ValueError(
            f"is {drafts}; a verify takes 1 to {MAX_NUM_DRAFTS} drafts, "
            "and none is what --no-speculative is for"
        )
    return drafts


class SpeculationSettings(SettingsGroup):
    """Speculative decoding: the same output in fewer steps, for models with an MTP head."""

    speculative: Annotated[
        bool,
        Knob(
            "Let the model's MTP head draft tokens",
            ("--speculative",),
            ("SPARK_SPECULATIVE",),
        ),
    ] = False
    num_drafts: Annotated[
        int,
        Knob(
            f"Drafts per sequence and step at most, 1 to {MAX_NUM_DRAFTS}",
            ("--num-drafts",),
            ("SPARK_NUM_DRAFTS",),
            "N",
        ),
        AfterValidator(_verifiable),
    ] = 3
    ssm_rollback_mode: Annotated[
        Literal["snapshot", "replay", "carry"],
        Knob(
            "How recurrent state survives rejected drafts: one state per row, the rows since a "
            "checkpoint run again, or accepted rows carried into the next step",
            ("--ssm-rollback-mode",),
            ("SPARK_SSM_ROLLBACK_MODE",),
        ),
    ] = "carry"
    spec_controller: Annotated[
        Literal["auto", "on", "off"],
        Knob(
            "Pick the drafts of each width by measured tokens per second; auto does, unless a "
            "static rung, an explicit ladder or no ladder is set, off leaves the ladder in charge",
            ("--spec-controller",),
            ("SPARK_SPEC_CONTROLLER",),
        ),
    ] = "auto"
    mtp_k_ladder: Annotated[
        str | None,
        Knob(
            "Drafts by width, n_max:drafts steps such as 4:3,8:2,16:1; not set is 4:3,8:3,16:1,"
            "32:1, and so is a value that does not parse, with a warning",
            env=("ATLAS_MTP_K_LADDER",),
        ),
    ] = None
    no_mtp_k_ladder: Annotated[
        Presence,
        Knob(
            "Presence: num-drafts at every width, and ATLAS_MTP_MAX_SEQS is 4 unless set",
            env=("ATLAS_NO_MTP_K_LADDER",),
        ),
    ] = False
    mtp_max_seqs: Annotated[
        int | None,
        Knob(
            "Widest batch that speculates; not set is 32, or 4 without a ladder",
            env=("ATLAS_MTP_MAX_SEQS",),
        ),
    ] = Field(default=None, ge=0)
    mtp_static_rung: Annotated[
        Presence,
        Knob(
            "Presence: keep the ladder's drafts at widths 9 to 16 whatever is accepted",
            env=("ATLAS_MTP_STATIC_RUNG",),
        ),
    ] = False
    mtp_pool_full_width: Annotated[
        Presence,
        Knob(
            "Presence: every slot may speculate, not only the lowest 32 (or ATLAS_MTP_MAX_SEQS)",
            env=("ATLAS_MTP_POOL_FULL_WIDTH",),
        ),
    ] = False
    ep_protocol: Annotated[
        str | None,
        Knob(
            "v2 pins sequences to their slots, with or without speculation, and implies "
            "ATLAS_MTP_POOL_FULL_WIDTH; other values change nothing",
            env=("ATLAS_EP_PROTOCOL",),
        ),
    ] = None
    mtp_dcut_max_seqs: Annotated[
        int | None,
        Knob(
            f"Widest batch whose least likely drafts are dropped; not set is {DCUT_MAX_SEQS}, "
            "0 is never",
            env=("ATLAS_MTP_DCUT_MAX_SEQS",),
        ),
    ] = Field(default=None, ge=0)
    no_mtp_dcut: Annotated[
        Presence,
        Knob("Presence: verify unlikely drafts too", env=("ATLAS_NO_MTP_DCUT",)),
    ] = False

    @property
    def pinned_slots(self) -> bool:
        """No sequence is ever moved to another slot."""
        return self.ep_protocol == _PINNED

    def policy(self, *, recurrent: bool) -> PolicySettings | None:
        """What the engine is told, None without speculation.

        Args:
            recurrent: the model has layers with a recurrent state.
        """
        if not self.speculative:
            return None
        widest = self.mtp_dcut_max_seqs
        return PolicySettings(
            num_drafts=self.num_drafts,
            rollback=SsmRollbackMode(self.ssm_rollback_mode),
            ladder_text=self.mtp_k_ladder,
            ladder_disabled=self.no_mtp_k_ladder,
            mtp_max_seqs_override=self.mtp_max_seqs,
            static_rung=self.mtp_static_rung,
            pool_full_width=self.mtp_pool_full_width,
            pinned_slots=self.pinned_slots,
            dcut_max_seqs=DCUT_MAX_SEQS if widest is None else widest,
            dcut_off=self.no_mtp_dcut,
            controller=ControllerMode(self.spec_controller),
            recurrent=recurrent,
        )


# What means nothing without --speculative; ep_protocol pins slots either way.
_DEPENDENT = (
    "num_drafts",
    "ssm_rollback_mode",
    "spec_controller",
    "mtp_k_ladder",
    "no_mtp_k_ladder",
    "mtp_max_seqs",
    "mtp_static_rung",
    "mtp_pool_full_width",
    "mtp_dcut_max_seqs",
    "no_mtp_dcut",
)


def check_together(settings: SpeculationSettings, origins: Mapping[str, str]) -> Iterator[str]:
    """Warnings on what was given and does not count, each once.

    Args:
        origins: path (`speculation.num_drafts`) to spelling (`--num-drafts`).

    Raises:
        ConfigError: a flag that needs --speculative without it.
    """
    if settings.ep_protocol is not None and settings.ep_protocol not in _PROTOCOLS:
        yield (
            f"{origins['speculation.ep_protocol']}={settings.ep_protocol!r} is not {_PINNED} "
            "and changes nothing"
        )
    policy = settings.policy(recurrent=True)
    if policy is None:
        for name in _DEPENDENT:
            origin = origins.get(f"speculation.{name}")
            if origin is None:
                continue
            if origin.startswith("--"):
                raise ConfigError(
                    f"{origin} needs --speculative; add --speculative or leave {origin} out"
                )
            yield f"{origin} has no effect without --speculative"
        return
    yield from policy.warnings
    if settings.mtp_max_seqs == 0:
        yield f"{origins['speculation.mtp_max_seqs']} is 0, so that no batch speculates"
    if settings.no_mtp_dcut and settings.mtp_dcut_max_seqs is not None:
        yield (
            f"{origins['speculation.no_mtp_dcut']} is set, so that "
            f"{origins['speculation.mtp_dcut_max_seqs']} is not used"
        )
