"""Segments to index tensors: positions, owners, wanted rows and padded block tables."""

from __future__ import annotations

import numpy as np
import torch

from engine.model.batching import step_input
from engine.pools.rollback import RowLayout
from engine.runner import RowPhase, Segment


def test_rows_of_three_sequences() -> None:
    segments = [
        Segment(2, 70, (5,), RowPhase.DECODE, 1, (4, 9), 1),
        Segment(0, 64, (7, 8, 9), RowPhase.PREFILL, 3, (1,), 0),
        Segment(1, 3, (1, 2, 3), RowPhase.DECODE, 1, (6, 7, 8), 2),
    ]
    pending = np.array([0, 2, 1, 0], np.int64)
    layouts = [RowLayout(1), RowLayout(3), RowLayout(1, ring_first=1, ring_rows=2)]
    step = step_input(segments, layouts, pending, 99, torch.device("cpu"))
    batch = step.batch
    assert step.token_ids.tolist() == [5, 7, 8, 9, 1, 2, 3]
    assert batch.positions.tolist() == [70, 64, 65, 66, 3, 4, 5]
    assert batch.row_segment.tolist() == [0, 1, 1, 1, 2, 2, 2]
    assert batch.row_start.tolist() == [0, 1, 4, 7]
    assert batch.starts.tolist() == [70, 64, 3]
    assert batch.slots.tolist() == [2, 0, 1]
    assert batch.committed.tolist() == [1, 3, 1]
    assert batch.pending.tolist() == [1, 0, 2]
    assert batch.ring_first.tolist() == [0, 0, 1]
    assert batch.ring_rows.tolist() == [0, 0, 2]
    assert batch.snapshots.tolist() == [-1, -1, -1]
    assert batch.first_key.tolist() == [0, 0, 0]
    assert batch.chunked.tolist() == [0, 1, 0]
    assert batch.block_tables.tolist() == [[4, 9, 99], [1, 99, 99], [6, 7, 8]]
    assert (batch.longest, batch.prefills, batch.recurrent_rows) == (3, True, 4)
    assert step.logit_rows.tolist() == [0, 5, 6]
