"""The seam between scheduling and the model: what a step asks of a model, as a protocol.

`engine.model` implements it with tensors; tests implement it with a few lines of arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Int64 = NDArray[np.int64]


class RowPhase(Enum):
    """Which algorithm a segment's rows go through.

    PREFILL: prompt rows, all committed, the chunked form is allowed; starts on the 64 grid.
    DECODE: row 0 is the last emitted token (committed), further rows are unverified drafts.
    REPLAY: generated tokens of a resumed sequence, all committed, recurrent form.
    """

    PREFILL = "prefill"
    DECODE = "decode"
    REPLAY = "replay"


class Save(NamedTuple):
    """A state that a forward sets aside: that after `rows` own rows of a prompt, at `place`.

    `rows` is a multiple of 64.
    """

    rows: int
    place: int


@dataclass(frozen=True, slots=True)
class Segment:
    """The rows of one sequence in one step.

    Attributes:
        slot: state slot of the sequence.
        start: position of the first row, i.e. tokens that the sequence consumed before it.
        token_ids: one id per row, at least one.
        phase: see RowPhase.
        committed: leading rows whose tokens are final (all but drafts); their state is kept.
        block_table: KV blocks of the sequence, enough for `start + len(token_ids)` tokens.
        logit_rows: how many of the last rows need logits (0 for a chunk that is not the last).
        next_token: the prompt token after the last row of a chunk that is not the last, for the
            drafter's rows; None when it is sampled from this step's logits.
        saves: states of a prompt to set aside for the prefix cache, by rising rows.
    """

    slot: int
    start: int
    token_ids: tuple[int, ...]
    phase: RowPhase
    committed: int
    block_table: tuple[int, ...]
    logit_rows: int
    next_token: int | None = None
    saves: tuple[Save, ...] = ()


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """logits: [sum of logit_rows, vocabulary] float32, in the order of the segments.

    hidden: [rows, hidden] after the final norm, in the order of the rows (the drafter's input).
    Both are good until the next forward.
    """

    logits: Tensor
    hidden: Tensor


class Verified(NamedTuple):
    """What became of a verify: `emitted` of the segment's `rows` rows led to emitted tokens.

    `emitted` counts row 0 and the accepted drafts that were kept, after cuts; at least 1.
    """

    slot: int
    rows: int
    emitted: int


class SavedState(NamedTuple):
    """A state of a decode to set aside, in terms of the slot's segment in the step that just ran.

    Attributes:
        slot: state slot of the sequence, as in the step's segment.
        place: where the copy goes.
        rows, emitted: of the segment; as in Verified where it was a verify, else equal.
        wanted: own rows after which the state is wanted, 1 to `emitted`.
        hidden_row: index of the last of these in the step's `ForwardResult.hidden`.
    """

    slot: int
    place: int
    rows: int
    emitted: int
    wanted: int
    hidden_row: int


class Restore(NamedTuple):
    """A state that was set aside, for a sequence that begins behind its prefix.

    Attributes:
        slot: state slot of the sequence.
        place: where the copy lies.
        position: tokens of the prefix, i.e. position of the sequence's first own row.
        first_drafted: the drafter's rows are there from this position to `position - 1`; the last
            of them depends on the token behind it.
        next_token: the token at `position`.
    """

    slot: int
    place: int
    position: int
    first_drafted: int
    next_token: int


@dataclass(frozen=True, slots=True)
class DraftRows:
    """Rows of one sequence that became final in a step, for the drafter.

    Attributes:
        slot: state slot of the sequence, after compaction.
        start: position of the first row.
        first_row: index of that row in the step's `ForwardResult.hidden`.
        next_tokens: the token after each row, one per row.
        block_table: KV blocks of the sequence.
        engaged: write the drafter's own rows now; else only remember the last hidden states.
        drafts: tokens to propose after the last row, 0 for none; needs `engaged`.
    """

    slot: int
    start: int
    first_row: int
    next_tokens: tuple[int, ...]
    block_table: tuple[int, ...]
    engaged: bool
    drafts: int


@dataclass(frozen=True, slots=True)
class PlainRows:
    """One final row of each of many sequences that do not speculate; arrays of int64 [n].

    Attributes:
        slots: state slot of each sequence.
        positions: of the rows.
        rows: their indices in the step's `ForwardResult.hidden`; None where it has these rows only.
        next_tokens: the token after each row.
    """

    slots: Int64
    positions: Int64
    rows: Int64 | None
    next_tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens for one sequence with the drafter's log-probability of each."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


class ModelRunner(Protocol):
    """A loaded model with its state and KV pools."""

    vocab_size: int
    device: torch.device

    @property
    def state_bytes(self) -> int:
        """Bytes of recurrent state read and written so far."""
        ...

    def forward(self, segments: Sequence[Segment]) -> ForwardResult:
        """Run all rows in one pass; writes KV of every row and state of committed rows only, and
        what the segments set aside.
        """
        ...

    def claim_slot(self, slot: int) -> None:
        """A new sequence takes `slot`: its first row must see zero state whatever is stored."""
        ...

    def move_slot(self, src: int, dst: int) -> None:
        """Copy everything that belongs to the sequence in `src` to `dst` (compaction)."""
        ...

    def accept(self, verified: Sequence[Verified]) -> None:
        """Keep of each verified slot what was emitted; comes once after every verify step."""
        ...

    def draft(self, rows: Sequence[DraftRows], hidden: Tensor) -> list[Proposal]:
        """Take over final rows and propose tokens; one proposal per entry, empty where none."""
        ...

    def remember(self, rows: PlainRows, hidden: Tensor) -> None:
        """Take over single final rows without drafting; the same as `draft` with nothing engaged,
        and cheap enough for every step of a wide batch.
        """
        ...


class StateKeeper(Protocol):
    """What the prefix cache needs of a model beside its steps."""

    def save_state(self, saved: SavedState, hidden: Tensor) -> None:
        """Set a state aside; comes after `accept` and before any slot is moved or claimed.

        hidden [step rows, hidden] is that of the step.
        """
        ...

    def note_hidden(self, place: int, hidden: Tensor) -> None:
        """hidden [hidden] is that of the last token before the state that a forward left at
        `place`.
        """
        ...

    def restore(self, restored: Restore) -> None:
        """Begin a sequence, whose slot was claimed, behind a prefix that was set aside."""
        ...

    def drafted_rows(self, slot: int) -> tuple[int, int]:
        """(first, end) positions of the slot's sequence that the drafter's layer holds rows of."""
        ...
