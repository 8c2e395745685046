"""Segments of a step to index tensors. Knows neither weights nor requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.pools.rollback import RowLayout
from engine.runner import RowPhase, Segment
from engine.transfer import Int64 as Int64
from engine.transfer import send
from kernels.batch import RaggedBatch


@dataclass(frozen=True, slots=True)
class StepInput:
    """token_ids [R] and logit_rows [n] (rows whose logits are wanted), int64, with the batch."""

    token_ids: Tensor
    logit_rows: Tensor
    batch: RaggedBatch


class StepArrays(NamedTuple):
    """The index arrays of a step on the host, int64; the fields are those of StepInput."""

    token_ids: Int64
    logit_rows: Int64
    positions: Int64
    row_segment: Int64
    row_start: Int64
    starts: Int64
    slots: Int64
    committed: Int64
    pending: Int64
    ring_first: Int64
    ring_rows: Int64
    snapshots: Int64
    first_key: Int64
    chunked: Int64
    block_tables: Int64

    @property
    def longest(self) -> int:
        """Rows of the longest sequence."""
        return int((self.row_start[1:] - self.row_start[:-1]).max())

    @property
    def recurrent_rows(self) -> int:
        """Rows of the sequences that are not chunked."""
        rows = int(self.row_start[-1])
        return rows - int(self.chunked @ (self.row_start[1:] - self.row_start[:-1]))


def is_verify(segment: Segment) -> bool:
    """Whether the segment has unverified rows."""
    return segment.committed < len(segment.token_ids)


def step_arrays(
    segments: Sequence[Segment],
    layouts: Sequence[RowLayout],
    pending: Int64,
    dummy_block: int,
    first_key: Int64 | None = None,
    table_width: int = 0,
) -> StepArrays:
    """Lay the segments' rows side by side.

    Args:
        segments: the step's rows.
        layouts: what the GDN layers do with them, one per segment.
        pending: [slots + 1] rows in each slot's ring.
        dummy_block: pads the block tables.
        first_key: [segments] oldest position that attention sees; all 0 when absent.
        table_width: blocks of a table at least; kernels that are compiled for one width want it.
    """
    counts = np.array([len(s.token_ids) for s in segments], np.int64)
    row_start = np.zeros(len(segments) + 1, np.int64)
    np.cumsum(counts, out=row_start[1:])
    rows = int(row_start[-1])
    starts = np.array([s.start for s in segments], np.int64)
    slots = np.array([s.slot for s in segments], np.int64)
    row_segment = np.repeat(np.arange(len(segments)), counts)
    within = np.arange(rows) - row_start[row_segment]
    logit_counts = np.array([s.logit_rows for s in segments], np.int64)
    # The last logit_rows rows of each segment.
    wanted = within >= (counts - logit_counts)[row_segment]
    token_ids = np.fromiter(
        (token for s in segments for token in s.token_ids), np.int64, count=rows
    )
    return StepArrays(
        token_ids=token_ids,
        logit_rows=np.flatnonzero(wanted),
        positions=starts[row_segment] + within,
        row_segment=row_segment,
        row_start=row_start,
        starts=starts,
        slots=slots,
        committed=np.array([x.committed for x in layouts], np.int64),
        pending=pending[slots],
        ring_first=np.array([x.ring_first for x in layouts], np.int64),
        ring_rows=np.array([x.ring_rows for x in layouts], np.int64),
        snapshots=np.array([x.snapshot for x in layouts], np.int64),
        first_key=np.zeros(len(segments), np.int64) if first_key is None else first_key,
        chunked=np.array([s.phase is RowPhase.PREFILL for s in segments], np.int64),
        block_tables=_tables(segments, dummy_block, table_width),
    )


def step_input(
    segments: Sequence[Segment],
    layouts: Sequence[RowLayout],
    pending: Int64,
    dummy_block: int,
    device: torch.device,
    first_key: Int64 | None = None,
    table_width: int = 0,
) -> StepInput:
    """The arrays of step_arrays on the device, in one copy."""
    arrays = step_arrays(segments, layouts, pending, dummy_block, first_key, table_width)
    return placed_input(send(device, *arrays), arrays.longest, arrays.recurrent_rows)


def placed_input(tensors: Sequence[Tensor], longest: int, recurrent_rows: int) -> StepInput:
    """Tensors in the order of StepArrays, as a step with the host's plain numbers."""
    prefills = recurrent_rows < tensors[0].shape[0]
    numbers: tuple[Any, ...] = (*tensors[2:], longest, prefills, recurrent_rows)
    return StepInput(tensors[0], tensors[1], RaggedBatch(*numbers))


def _tables(segments: Sequence[Segment], dummy_block: int, table_width: int) -> Int64:
    widest = max(table_width, max(len(s.block_table) for s in segments))
    if table_width:
        tables = np.full((len(segments), widest), dummy_block, np.int64)
        for row, segment in zip(tables, segments, strict=True):
            row[: len(segment.block_table)] = segment.block_table
        return tables
    return np.array(
        [s.block_table + (dummy_block,) * (widest - len(s.block_table)) for s in segments], np.int64
    )
