"""How many drafts a step of a given width may carry. Knows no slots and no controller.

The reserve sizes verify pools by this policy, so that it lives here and not beside the scheduler.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_STEP = re.compile(r"\s*(\d+)\s*:\s*(\d+)\s*", re.ASCII)


@dataclass(frozen=True, slots=True)
class LadderStep:
    """Up to `n_max` decoding sequences, `drafts` drafts each."""

    n_max: int
    drafts: int


# Steps by rising n_max; None is a disabled ladder: num_drafts at every width.
Ladder = tuple[LadderStep, ...]
DEFAULT_LADDER: Ladder = (
    LadderStep(4, 3),
    LadderStep(8, 3),
    LadderStep(16, 1),
    LadderStep(32, 1),
)


def parse_ladder(text: str) -> Ladder | None:
    """Steps such as `4:3,8:2,16:1`, sorted by width; None when any part does not parse."""
    steps = []
    for part in text.split(","):
        match = _STEP.fullmatch(part)
        if match is None:
            return None
        steps.append(LadderStep(int(match[1]), int(match[2])))
    return tuple(sorted(steps, key=lambda step: step.n_max))


def mtp_ladder_drafts(
    n_active: int, num_drafts: int, ladder: Ladder | None = DEFAULT_LADDER
) -> int:
    """Drafts per sequence when `n_active` sequences decode, in [1, num_drafts]; 0 without any."""
    if num_drafts == 0:
        return 0
    if not ladder:
        return num_drafts
    drafts = next((s.drafts for s in ladder if n_active <= s.n_max), ladder[-1].drafts)
    return min(max(drafts, 1), num_drafts)
