"""What one step does and what came of it, as frozen values. Knows no policy and no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
from enum import StrEnum

from engine.errors import RequestError
from engine.request import TokenLogprobs
from engine.runner import Restore, Segment
from engine.sampling.state import SamplingRow
from engine.scheduler.sequence import Sequence


class StepKind(StrEnum):
    """What the rows of a step are: `verify` has drafts, `mixed` has prompt and decode rows."""

    DECODE = "decode"
    PREFILL = "prefill"
    MIXED = "mixed"
    VERIFY = "verify"


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass: decode rows in slot order, then prompt and replay rows in queue order.

    Attributes:
        segments: the rows, one segment per sequence.
        sequences: whose segment it is, in the same order.
        sampling_rows: one per logits row of the forward, in the same order.
        claims: slots whose new owner's first rows are in this step; the runner clears them first.
        kind: see StepKind.
        rows: token rows in all segments.
        restores: of the claimed slots, those whose owners begin behind a cached prefix.
    """

    segments: tuple[Segment, ...]
    sequences: tuple[Sequence, ...]
    sampling_rows: tuple[SamplingRow, ...]
    claims: tuple[int, ...]
    kind: StepKind
    rows: int
    restores: tuple[Restore, ...] = ()


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What the step produced, one entry per sequence of the plan.

    Attributes:
        tokens: the verified tokens of each sequence: one target, or a burst of accepted drafts and
            the target after them; empty where the segment had no logit rows.
        logprobs: one entry per token where they were asked for, else empty.
        failures: index in the plan -> a sentence, or what is wrong with the request, for sequences
            that cannot go on.
    """

    tokens: Listing[Listing[int]]
    logprobs: Listing[Listing[TokenLogprobs]] = ()
    failures: Mapping[int, str | RequestError] = field(default_factory=dict)
