"""How a serve speculates, as handed over by the settings. Knows no model."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from engine.reserve.ssm_reserve import SpeculationPolicy, SsmRollbackMode
from engine.speculation.policy import PolicySettings


class ControllerSwitch(StrEnum):
    """Whether the controller that measures tokens per second chooses the depth.

    AUTO: unless the environment pins the ladder.
    """

    AUTO = "auto"
    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Speculation is on.

    Attributes:
        num_drafts: per sequence and step at most, at least 1.
        rollback: how a verify gets rid of rejected rows.
        controller: see ControllerSwitch.
        policy: what the environment pins.
    """

    num_drafts: int = 3
    rollback: SsmRollbackMode = SsmRollbackMode.CARRY
    controller: ControllerSwitch = ControllerSwitch.AUTO
    policy: PolicySettings = field(default_factory=PolicySettings)

    @property
    def controlled(self) -> bool:
        """Whether the cost-aware controller is in charge."""
        if self.controller is ControllerSwitch.AUTO:
            return not self.policy.rung_pinned
        return self.controller is ControllerSwitch.ON

    def reserve_policy(self) -> SpeculationPolicy:
        """What the ledger and the pools depend on."""
        return self.policy.reserve_policy(self.num_drafts, self.rollback)
