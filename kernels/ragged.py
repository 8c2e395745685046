"""Ragged steps written down sequence by sequence, for checks of kernels. Knows no operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.batch import RaggedBatch


@dataclass(frozen=True, slots=True)
class Rows:
    """One sequence's part of a step; see RaggedBatch.

    Attributes:
        start: tokens that the sequence consumed before.
        count: own rows.
        committed: of them, all when None.
        pending: rows in the slot's ring that run first.
        ring: (first, count) of the own rows that are left there, when None those not committed.
        snapshot: place of the state after the first own row, -1 for none.
        saves: (own rows, place) of the states to set aside, by rising rows.
    """

    slot: int
    start: int
    count: int
    committed: int | None = None
    pending: int = 0
    chunked: bool = False
    ring: tuple[int, int] | None = None
    snapshot: int = -1
    first_key: int = 0
    saves: tuple[tuple[int, int], ...] = ()

    @property
    def kept(self) -> int:
        """Leading rows that run on the stored state."""
        return self.count if self.committed is None else self.committed

    @property
    def ring_rows(self) -> tuple[int, int]:
        """(first, count) of the rows left in the ring."""
        return self.ring or (self.kept, self.count - self.kept)


def ragged_batch(
    rows: Sequence[Rows], block_tables: Sequence[Sequence[int]], device: torch.device | str = "cpu"
) -> RaggedBatch:
    """The step of these rows; `block_tables` are the KV blocks of each, equally many."""

    def index(values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    saves = [(s, *save) for s, r in enumerate(rows) for save in r.saves]
    row_start = [0]
    for r in rows:
        row_start.append(row_start[-1] + r.count)
    return RaggedBatch(
        positions=index([r.start + i for r in rows for i in range(r.count)]),
        row_segment=index([s for s, r in enumerate(rows) for _ in range(r.count)]),
        row_start=index(row_start),
        starts=index([r.start for r in rows]),
        slots=index([r.slot for r in rows]),
        committed=index([r.kept for r in rows]),
        pending=index([r.pending for r in rows]),
        ring_first=index([r.ring_rows[0] for r in rows]),
        ring_rows=index([r.ring_rows[1] for r in rows]),
        snapshots=index([r.snapshot for r in rows]),
        first_key=index([r.first_key for r in rows]),
        chunked=index([int(r.chunked) for r in rows]),
        block_tables=index([list(table) for table in block_tables]),
        longest=max(r.count for r in rows),
        prefills=any(r.chunked for r in rows),
        recurrent_rows=sum(r.count for r in rows if not r.chunked),
        saves=index(saves) if saves else None,
    )


def blocks_by_slot(rows: Sequence[Rows], blocks: int) -> list[range]:
    """Block tables in which every slot owns `blocks` blocks side by side."""
    return [range(r.slot * blocks, (r.slot + 1) * blocks) for r in rows]
