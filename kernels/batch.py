"""Index tensors of one ragged step, for every operator. Knows rows and slots, not requests."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """R rows of S sequences, the rows of a sequence side by side; every tensor is int64.

    The plain numbers are for the host, which must not wait for a device to learn them. A sequence
    with neither own nor pending rows is padding: nothing of it is read or written.

    Attributes:
        positions: [R] position of each row in its sequence.
        row_segment: [R] index of the sequence that owns each row.
        row_start: [S + 1] first row of each sequence, then R.
        starts: [S] tokens that the sequence consumed before its first row; 0 means that the stored
            state is another's and must be taken as zero.
        slots: [S] state slot of each sequence.
        committed: [S] leading rows that run on the stored state; the others run on a copy.
        pending: [S] rows in the slot's ring that must run before the first own row.
        ring_first, ring_rows: [S] own rows that are left in the slot's ring, from its first place.
        snapshots: [S] place of the state after the first own row among the verify snapshots, the
            others behind it; -1 where no snapshot is taken.
        first_key: [S] oldest position that attention sees; 0 but for a drafter with a gap.
        chunked: [S] 1 where the chunked form of the GDN recurrence is allowed (prefill).
        block_tables: [S, B] KV blocks of each sequence, padded with the dummy block.
        longest: rows of the longest sequence.
        prefills: whether any sequence is chunked.
        recurrent_rows: rows of the sequences that are not chunked; None where nobody counted them.
        saves: [n, 3] states to set aside: index of a chunked sequence, own rows after which, place.
            The rows are a multiple of 64 and sequences begin on one. None where n is 0.
    """

    positions: Tensor
    row_segment: Tensor
    row_start: Tensor
    starts: Tensor
    slots: Tensor
    committed: Tensor
    pending: Tensor
    ring_first: Tensor
    ring_rows: Tensor
    snapshots: Tensor
    first_key: Tensor
    chunked: Tensor
    block_tables: Tensor
    longest: int
    prefills: bool
    recurrent_rows: int | None = None
    saves: Tensor | None = None
