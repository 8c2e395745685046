"""D-Cut: drop the drafts of a step that are least likely to survive. Knows no ladder and no slot.

Only which drafts are verified changes, never which tokens come out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from engine.errors import InvariantError

# At depth in wider batches, ragged pruning sheds more winning drafts than it saves rows.
DCUT_MAX_SEQS = 8
# Shares of the drafts after the first that may be kept; few values, so that few shapes arise.
KEEP_BUCKETS = (0.25, 0.5, 0.75, 1.0)
DEFAULT_KEEP = 0.75


def dcut_drafts(
    drafts: Sequence[int],
    logprobs: Sequence[Sequence[float]],
    *,
    max_seqs: int = DCUT_MAX_SEQS,
    keep: float = DEFAULT_KEEP,
) -> tuple[int, ...]:
    """Drafts to verify per sequence: its first one, and the best `keep` of all later ones.

    Later drafts are ranked over the whole batch by log survival, the sum of the drafter's top-1
    log-probabilities up to and with the draft. It never rises with depth, so that what is kept of
    a sequence is a prefix. Ties go to the shallower draft, then to the earlier sequence; a share
    that is no whole number is rounded up.

    Args:
        drafts: per sequence.
        logprobs: per sequence and draft; where one is missing or no number, the draft is certain.
        max_seqs: wider batches are left alone, 0 leaves all alone.
        keep: one of KEEP_BUCKETS.

    Raises:
        InvariantError: `keep` is no bucket, or there is not one list of `logprobs` per sequence.
    """
    if keep not in KEEP_BUCKETS:
        raise InvariantError(f"D-Cut keeps a share of {KEEP_BUCKETS}, not {keep}")
    if len(drafts) != len(logprobs):
        raise InvariantError(f"{len(drafts)} draft counts and {len(logprobs)} lists of logprobs")
    if len(drafts) > max_seqs:
        return tuple(drafts)
    later = sorted(
        (-survival, depth, sequence)
        for sequence, (count, known) in enumerate(zip(drafts, logprobs, strict=True))
        for depth, survival in enumerate(_log_survival(count, known))
        if depth > 0
    )
    kept = [min(count, 1) for count in drafts]
    for _, _, sequence in later[: math.ceil(keep * len(later))]:
        kept[sequence] += 1
    return tuple(kept)


def _log_survival(count: int, known: Sequence[float]) -> list[float]:
    """Running sums of `count` log-probabilities, none of them above 0."""
    filled = [*known[:count], *[0.0] * (count - len(known))]
    return list(accumulate(0.0 if math.isnan(value) else min(value, 0.0) for value in filled))
