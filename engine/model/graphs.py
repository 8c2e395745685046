"""Decode and verify steps captured once per bucket and replayed: one launch in place of hundreds.

Knows rows, entries and buffers, not what a step computes. A step is padded to its bucket with
sequences in the dummy slot and with empty ones, which no kernel touches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.model.batching import StepArrays, StepInput, placed_input
from engine.pools.buffers import StepBuffers
from engine.reserve.graphs import Bucket
from engine.runner import ForwardResult
from engine.transfer import Int64, split, staged

logger = logging.getLogger(__name__)

Run = Callable[[StepInput], tuple[Tensor, Tensor]]


class Capture(Protocol):
    """Records what a function launches, and gives a callable that launches all of it again."""

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]: ...


class CudaCapture:
    """Capture by torch.cuda.CUDAGraph; all graphs share one memory pool, and run in turn."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run once, so that every kernel is compiled and cuBLAS has chosen, then record."""
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        replay: Callable[[], None] = graph.replay
        return replay


class StepGraphs:
    """Replays steps that fit a bucket.

    Args:
        buckets: the shapes to capture; see graph_buckets.
        buffers: what the graphs read and write.
        run: a step -> (logits [R, V], hidden [R, H]) of all its rows.
        capture: how to record.
        dummy_slot: state slot of padding rows.
        dummy_block: KV block of padding rows.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        buffers: StepBuffers,
        run: Run,
        capture: Capture,
        *,
        dummy_slot: int,
        dummy_block: int,
    ) -> None:
        self._buckets = sorted(buckets, key=lambda b: (b.rows, b.longest))
        self._buffers = buffers
        self._run = run
        self._capture = capture
        self._dummy_slot = dummy_slot
        self._dummy_block = dummy_block
        self._replays: dict[Bucket, Callable[[], None]] = {}

    def capture_all(self) -> None:
        """Record every bucket, the largest first, and say so in the log."""
        for number, bucket in enumerate(reversed(self._buckets), 1):
            self._place(padded(_nothing(self._buffers.table_width), bucket, *self._dummies()))
            self._replays[bucket] = self._capture(self._recorded(bucket))
            logger.info(
                "Captured a CUDA graph of %d rows, at most %d a sequence (%d of %d)",
                bucket.rows,
                bucket.longest,
                number,
                len(self._buckets),
            )

    def replay(self, arrays: StepArrays) -> ForwardResult | None:
        """Run a step all of whose rows want logits; None when no bucket holds it.

        The result lies in the buffers: the next replay overwrites it.
        """
        rows, longest = len(arrays.token_ids), arrays.longest
        bucket = self.bucket_of(rows, longest)
        if bucket is None:
            return None
        self._place(padded(arrays, bucket, *self._dummies()))
        self._replays[bucket]()
        return ForwardResult(self._buffers.logits[:rows], self._buffers.hidden[:rows])

    def bucket_of(self, rows: int, longest: int) -> Bucket | None:
        """The captured bucket with the fewest rows that holds such a step."""
        for bucket in self._buckets:
            if bucket.rows >= rows and bucket.longest >= longest and bucket in self._replays:
                return bucket
        return None

    def _dummies(self) -> tuple[int, int]:
        return self._dummy_slot, self._dummy_block

    def _place(self, arrays: StepArrays) -> None:
        """Copy a padded step into the buffers; tables of empty entries stay what they were."""
        flat = staged(arrays, self._buffers.indices.device)
        self._buffers.indices[: len(flat)].copy_(flat, non_blocking=True)

    def _recorded(self, bucket: Bucket) -> Callable[[], None]:
        buffers, rows = self._buffers, bucket.rows
        views = split(buffers.indices, _shapes(rows, buffers.table_width))
        step = placed_input(views, bucket.longest, recurrent_rows=rows)

        def run() -> None:
            logits, hidden = self._run(step)
            buffers.logits[:rows].copy_(logits)
            buffers.hidden[:rows].copy_(hidden)

        return run


def padded(arrays: StepArrays, bucket: Bucket, dummy_slot: int, dummy_block: int) -> StepArrays:
    """The step with bucket.rows rows and as many entries; block tables of used entries only.

    Missing rows belong to sequences in the dummy slot that begin at position 0, `longest` rows each
    at most; entries that are left over have no rows.
    """
    rows, entries = len(arrays.token_ids), len(arrays.starts)
    if rows == entries == bucket.rows:
        return arrays
    missing, longest = bucket.rows - rows, bucket.longest
    counts = [longest] * (missing // longest)
    if missing % longest:
        counts.append(missing % longest)
    fillers = len(counts)
    empty = bucket.rows - entries - fillers
    assert missing >= 0, "the bucket is too small"
    assert empty >= 0, "an entry without rows is no sequence of a step"

    def behind(array: Int64, filler: Int64 | int, rest: int) -> Int64:
        tail = np.full(fillers, filler, np.int64) if isinstance(filler, int) else filler
        return np.concatenate((array, tail, np.full(empty, rest, np.int64)))

    filled = np.array(counts, np.int64)
    owners = np.repeat(np.arange(entries, entries + fillers), filled)
    within = np.concatenate([np.arange(count) for count in counts]) if counts else filled
    ends = rows + np.cumsum(filled)
    tables = np.full((fillers, arrays.block_tables.shape[1]), dummy_block, np.int64)
    return StepArrays(
        token_ids=np.concatenate((arrays.token_ids, np.zeros(missing, np.int64))),
        logit_rows=np.arange(bucket.rows),
        positions=np.concatenate((arrays.positions, within)),
        row_segment=np.concatenate((arrays.row_segment, owners)),
        row_start=behind(arrays.row_start, ends, bucket.rows),
        starts=behind(arrays.starts, 0, 0),
        slots=behind(arrays.slots, dummy_slot, dummy_slot),
        committed=behind(arrays.committed, filled, 0),
        pending=behind(arrays.pending, 0, 0),
        ring_first=behind(arrays.ring_first, 0, 0),
        ring_rows=behind(arrays.ring_rows, 0, 0),
        snapshots=behind(arrays.snapshots, -1, -1),
        first_key=behind(arrays.first_key, 0, 0),
        chunked=behind(arrays.chunked, 0, 0),
        block_tables=np.concatenate((arrays.block_tables, tables)),
    )


def _nothing(table_width: int) -> StepArrays:
    """A step of no rows, which padding turns into one of padding only."""
    none = np.zeros(0, np.int64)
    fields = dict.fromkeys(StepArrays._fields, none)
    fields["row_start"] = np.zeros(1, np.int64)
    fields["block_tables"] = np.zeros((0, table_width), np.int64)
    return StepArrays(**fields)


def _shapes(rows: int, table_width: int) -> list[tuple[int, ...]]:
    """Of the padded arrays of a bucket, in the order of StepArrays."""
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(StepArrays._fields, (rows,))
    shapes["row_start"] = (rows + 1,)
    shapes["block_tables"] = (rows, table_width)
    return list(shapes.values())
