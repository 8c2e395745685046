"""Segments of a step to index tensors. Knows neither weights nor requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.pools.rollback import RowLayout
from engine.runner import RowPhase, Segment
from kernels.batch import RaggedBatch

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepInput:
    """token_ids [R] and logit_rows [n] (rows whose logits are wanted), int64, with the batch."""

    token_ids: Tensor
    logit_rows: Tensor
    batch: RaggedBatch


def is_verify(segment: Segment) -> bool:
    """Whether the segment has unverified rows."""
    return segment.committed < len(segment.token_ids)


def step_input(
    segments: Sequence[Segment],
    layouts: Sequence[RowLayout],
    pending: Int64,
    dummy_block: int,
    device: torch.device,
    first_key: Int64 | None = None,
) -> StepInput:
    """Lay the segments' rows side by side.

    Args:
        segments: the step's rows.
        layouts: what the GDN layers do with them, one per segment.
        pending: [slots + 1] rows in each slot's ring.
        dummy_block: pads the block tables.
        device: of the result.
        first_key: [segments] oldest position that attention sees; all 0 when absent.
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
    widest = max(len(s.block_table) for s in segments)
    tables = np.array(
        [s.block_table + (dummy_block,) * (widest - len(s.block_table)) for s in segments], np.int64
    )
    token_ids = np.fromiter(
        (token for s in segments for token in s.token_ids), np.int64, count=rows
    )

    on_host = device.type == "cpu"

    def place(array: Int64) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if on_host else tensor.to(device)

    batch = RaggedBatch(
        positions=place(starts[row_segment] + within),
        row_segment=place(row_segment),
        row_start=place(row_start),
        starts=place(starts),
        slots=place(slots),
        committed=place(np.array([x.committed for x in layouts], np.int64)),
        pending=place(pending[slots]),
        ring_first=place(np.array([x.ring_first for x in layouts], np.int64)),
        ring_rows=place(np.array([x.ring_rows for x in layouts], np.int64)),
        snapshots=place(np.array([x.snapshot for x in layouts], np.int64)),
        first_key=place(np.zeros(len(segments), np.int64) if first_key is None else first_key),
        chunked=place(np.array([s.phase is RowPhase.PREFILL for s in segments], np.int64)),
        block_tables=place(tables),
        longest=int(counts.max()),
        prefills=any(s.phase is RowPhase.PREFILL for s in segments),
    )
    return StepInput(place(token_ids), place(np.flatnonzero(wanted)), batch)
