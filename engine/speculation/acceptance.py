"""How likely each further draft is accepted, as of late. Knows no widths' costs and no clock."""

from __future__ import annotations

import math
from collections.abc import Sequence

# Verifies that the long and the short memory reach back; a batch counts as its sequences, so that
# both grow with the width and always hold a few steps.
_LONG, _LONG_STEPS = 128, 8
_SHORT_SHARE = 0.2
# The short memory replaces the long one when they differ by this many of its standard errors.
_JUMP = 3.0
_DOUBT_WEIGHT = 8.0
_PRIOR, _PRIOR_WEIGHT = 0.6, 4.0
# Where costs are known nobody looks at every depth, so that the guess must invite a look.
HOPEFUL = 0.8


class _Chance:
    """A share of successes under two rates of forgetting; starts as a weak guess."""

    def __init__(self, prior: float) -> None:
        self.value = self._short = prior
        self._weight = self._short_weight = _PRIOR_WEIGHT

    def see(self, hits: int, trials: int, width: int) -> float:
        """Count `hits` of `trials` of one step of `width` sequences; the jump, or 0."""
        memory = max(_LONG, _LONG_STEPS * width)
        self.value, self._weight = _forget(self.value, self._weight, hits, trials, memory)
        short = memory * _SHORT_SHARE
        self._short, self._short_weight = _forget(
            self._short, self._short_weight, hits, trials, short
        )
        spread = max(self._short * (1 - self._short), self.value * (1 - self.value), 0.02)
        # 2 w is the number of equal samples that an exponential memory of weight w is worth.
        error = math.sqrt(spread / (2 * self._short_weight))
        rise = self._short - self.value
        if abs(rise) <= _JUMP * error:
            return 0.0
        self.value = self._short
        self.doubt()
        return rise

    def doubt(self) -> None:
        """The traffic has turned: what comes now counts for more than what was."""
        self._weight = min(self._weight, _DOUBT_WEIGHT)


class AcceptanceProfile:
    """Chance of every draft once those before it are accepted, over all widths.

    Args:
        num_drafts: positions.
        prior: chance of each before anything was seen; a weak guess.
    """

    def __init__(self, num_drafts: int, prior: float = _PRIOR) -> None:
        self._chances = [_Chance(prior) for _ in range(num_drafts)]

    def see(self, depth: int, accepted: Sequence[int]) -> bool:
        """Count a step of `depth` drafts; whether some chance jumped up.

        `accepted` has one entry per decoding sequence.

        A draft that was cut before the verify counts as one that did not match: what is measured
        is what a step of this depth delivers.
        """
        jump = 0.0
        for position, chance in enumerate(self._chances[:depth]):
            trials = sum(count >= position for count in accepted)
            if trials:
                hits = sum(count > position for count in accepted)
                jump = chance.see(hits, trials, len(accepted)) or jump
            if jump:
                for deeper in self._chances[position + 1 :]:
                    deeper.doubt()
        return jump > 0

    def tokens(self, depth: int) -> float:
        """Tokens that a sequence may expect of a step of `depth` drafts, at least 1."""
        total = survival = 1.0
        for chance in self._chances[:depth]:
            survival *= chance.value
            total += survival
        return total


def _forget(
    value: float, weight: float, hits: int, trials: int, memory: float
) -> tuple[float, float]:
    """(mean, weight) after `trials` more samples, older ones fading over `memory` of them."""
    kept = weight * math.exp(-trials / memory)
    weight = kept + trials
    return (value * kept + hits) / weight, weight
