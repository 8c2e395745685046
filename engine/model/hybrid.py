"""A loaded hybrid model with its pools: the ModelRunner that the scheduler drives."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engine.model.batching import (
    StepArrays,
    StepInput,
    is_verify,
    placed_input,
    step_arrays,
    step_input,
)
from engine.model.drafter import Drafter
from engine.model.graphs import Capture, StepGraphs
from engine.model.layers import GdnMixer, Layer
from engine.model.mtp import MtpHead
from engine.model.threads import ThreadChooser
from engine.pools.allocate import Pools
from engine.pools.buffers import StepBuffers
from engine.pools.kv import KvPool
from engine.pools.rollback import Rollback, RowLayout, rollback_of
from engine.pools.state import SsmStatePool
from engine.reserve.graphs import Bucket
from engine.reserve.ssm_reserve import SsmRollbackMode
from engine.runner import (
    DraftRows,
    ForwardResult,
    PlainRows,
    Proposal,
    Restore,
    RowPhase,
    SavedState,
    Segment,
    Verified,
)
from engine.transfer import send
from engine.weights.model_config import ModelConfig
from kernels.ops import Linear, Ops


@dataclass(frozen=True, slots=True)
class Network:
    """Packed weights: embed [V, H] in the checkpoint's dtype, layers, norm [H], head, drafter."""

    embed: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    lm_head: Linear
    mtp: MtpHead | None


class HybridModel:
    """Network and pools behind `engine.runner.ModelRunner`.

    Args:
        config: of the checkpoint.
        network: packed layers that already hold views of the pools.
        pools: recurrent state by slot, pages of the attention layers, the drafter's log.
        ops: the chosen operators.
        dtype: of the activations.
        threads: CPU threads that a pass may use; see ThreadChooser.
        rollback: what becomes of rejected rows.
        table_width: blocks of every block table, 0 for as many as a step needs.
    """

    def __init__(
        self,
        config: ModelConfig,
        network: Network,
        pools: Pools,
        ops: Ops,
        dtype: torch.dtype,
        threads: int,
        rollback: SsmRollbackMode = SsmRollbackMode.CARRY,
        table_width: int = 0,
    ) -> None:
        self.config = config
        self.network = network
        self.states: SsmStatePool = pools.states
        self.kv: KvPool = pools.kv
        self.snapshots = pools.snapshots
        self._snapshot_hidden = pools.snapshot_hidden
        self.vocab_size = config.vocab_size
        self.device = pools.states.h.device
        self.rollback: Rollback = rollback_of(rollback, pools.states, pools.snapshots)
        self.drafter: Drafter | None = None
        if network.mtp is not None:
            self.drafter = Drafter(
                network.mtp,
                network.embed,
                network.lm_head,
                pools.drafter_log,
                pools.kv.dummy_block,
                table_width,
            )
        self.graphs: StepGraphs | None = None
        self._table_width = table_width
        self._ops = ops
        self._dtype = dtype
        self._threads = ThreadChooser(threads)

    @property
    def state_bytes(self) -> int:
        """Bytes of recurrent state read and written so far."""
        return self.states.bytes_moved

    def claim_slot(self, slot: int) -> None:
        """A new sequence takes `slot`."""
        self.states.claim(slot)
        if self.drafter is not None:
            self.drafter.claim(slot)

    def move_slot(self, src: int, dst: int) -> None:
        """Copy the sequence in `src` to `dst`, which is lower."""
        self.states.move(src, dst)
        if self.drafter is not None:
            self.drafter.move(src, dst)

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment]) -> ForwardResult:
        """Run all rows in one pass; see ModelRunner.forward.

        When it raises, state and KV of the segments' sequences are undefined: end them.
        """
        layouts = [self._layout(segment) for segment in segments]
        verified = [segment.slot for segment in segments if is_verify(segment)]
        if verified:
            self.rollback.before(verified)
        arrays = step_arrays(
            segments,
            layouts,
            self.states.pending,
            self.kv.dummy_block,
            table_width=self._table_width,
        )
        prefills = any(segment.phase is RowPhase.PREFILL for segment in segments)
        try:
            if self.graphs is not None and all(s.phase is RowPhase.DECODE for s in segments):
                result = self.graphs.replay(arrays)
            else:
                result = None
            if result is None:
                recurrent = arrays.recurrent_rows if prefills else len(arrays.token_ids)
                step = self._placed(arrays, recurrent, segments)
                with self._timed_threads("prefill" if prefills else "decode", len(step.token_ids)):
                    hidden = self._trunk(step)
                    logits = self.network.lm_head(hidden[step.logit_rows])
                result = ForwardResult(logits.float(), hidden)
        except Exception:
            if verified:
                self.rollback.undo(verified)
            raise
        self._count(segments, layouts)
        # Only now: a forward that raised midway must not fold its pending rows twice.
        for segment in segments:
            self.states.pending[segment.slot] = 0
        return result

    @torch.inference_mode()
    def capture(self, buckets: Sequence[Bucket], buffers: StepBuffers, capture: Capture) -> None:
        """Record decode and verify steps of every bucket, and replay them from now on."""

        def all_rows(step: StepInput) -> tuple[Tensor, Tensor]:
            hidden = self._trunk(step)
            return self.network.lm_head(hidden), hidden

        graphs = StepGraphs(
            buckets,
            buffers,
            all_rows,
            capture,
            dummy_slot=int(self.states.h.shape[1]) - 1,
            dummy_block=self.kv.dummy_block,
        )
        graphs.capture_all()
        self.graphs = graphs

    @torch.inference_mode()
    def accept(self, verified: Sequence[Verified]) -> None:
        """Keep what each verify emitted; see ModelRunner.accept."""
        slots = self.rollback.after(verified)
        if slots:
            self.fold(slots)

    @torch.inference_mode()
    def draft(self, rows: Sequence[DraftRows], hidden: Tensor) -> list[Proposal]:
        """Take over final rows and propose tokens; see ModelRunner.draft."""
        assert self.drafter is not None, "speculation is on without a drafter"
        if not any(entry.engaged for entry in rows):
            # Rows are copied and no kernel runs: setting threads would take longer than that.
            return self.drafter.draft(rows, hidden)
        with self._timed_threads("draft", sum(len(entry.next_tokens) for entry in rows)):
            return self.drafter.draft(rows, hidden)

    @torch.inference_mode()
    def remember(self, rows: PlainRows, hidden: Tensor) -> None:
        """Take over single final rows without drafting; see ModelRunner.remember."""
        assert self.drafter is not None, "speculation is on without a drafter"
        # Replayed graphs write every step's result to the same place.
        self.drafter.remember(rows, hidden, lasting=self.graphs is None)

    @torch.inference_mode()
    def save_state(self, saved: SavedState, hidden: Tensor) -> None:
        """Set a state aside for the prefix cache; see StateKeeper.save_state."""
        verified = Verified(saved.slot, saved.rows, saved.emitted)
        if saved.wanted == saved.rows and not self.states.pending[saved.slot]:
            self.snapshots.save(saved.slot, saved.place)
        else:
            self.rollback.export(verified, saved.wanted, saved.place, self.fold)
        self.note_hidden(saved.place, hidden[saved.hidden_row])

    @torch.inference_mode()
    def note_hidden(self, place: int, hidden: Tensor) -> None:
        """See StateKeeper.note_hidden."""
        if self.drafter is not None:
            self._snapshot_hidden[place] = hidden

    @torch.inference_mode()
    def restore(self, restored: Restore) -> None:
        """Begin a sequence behind a prefix; see StateKeeper.restore."""
        self.snapshots.load(restored.place, restored.slot)
        if self.drafter is not None:
            self.drafter.begin_behind(restored, self._snapshot_hidden[restored.place])

    def drafted_rows(self, slot: int) -> tuple[int, int]:
        """(first, end) rows that the drafter's layer holds; see StateKeeper.drafted_rows."""
        return (0, 0) if self.drafter is None else self.drafter.drafted_rows(slot)

    def explore_threads(self, on: bool) -> None:
        """See ThreadChooser.explore."""
        self._threads.explore(on)

    @torch.inference_mode()
    def fold(self, slots: Sequence[int]) -> None:
        """Run the pending rows of the slots on their states, so that nothing is pending."""
        slots = [slot for slot in slots if self.states.pending[slot]]
        if not slots:
            return
        segments = [Segment(slot, 1, (), RowPhase.REPLAY, 0, (), 0) for slot in slots]
        layouts = [RowLayout(committed=0) for _ in slots]
        step = step_input(segments, layouts, self.states.pending, self.kv.dummy_block, self.device)
        for layer in self.network.layers:
            if isinstance(layer.mixer, GdnMixer):
                layer.mixer.fold(step.batch)
        self._count(segments, layouts)
        self.states.pending[list(slots)] = 0

    def _placed(
        self, arrays: StepArrays, recurrent_rows: int, segments: Sequence[Segment]
    ) -> StepInput:
        """The step on the device, in one copy."""
        saves = [(i, *save) for i, s in enumerate(segments) for save in s.saves]
        extra = (np.array(saves, np.int64),) if saves else ()
        tensors = send(self.device, *arrays, *extra)
        step = placed_input(tensors[: len(arrays)], arrays.longest, recurrent_rows)
        if not saves:
            return step
        return replace(step, batch=replace(step.batch, saves=tensors[-1]))

    def _layout(self, segment: Segment) -> RowLayout:
        rows = len(segment.token_ids)
        if is_verify(segment):
            return self.rollback.layout(segment.slot, rows)
        return RowLayout(committed=rows)

    def _count(self, segments: Sequence[Segment], layouts: Sequence[RowLayout]) -> None:
        """Add the state bytes that a pass over these rows read and wrote."""
        states, moved = self.states, 0
        for segment, layout in zip(segments, layouts, strict=True):
            rows = len(segment.token_ids)
            # A first row takes the state as zero and reads none.
            moved += states.blob_bytes * (2 if segment.start else 1)
            moved += states.blob_bytes * len(segment.saves)
            ring = int(states.pending[segment.slot]) + layout.ring_rows
            moved += ring * states.ring_row_bytes
            if layout.snapshot >= 0:
                moved += (rows - 1) * states.h_bytes + rows * states.conv_bytes
        states.bytes_moved += moved

    def _trunk(self, step: StepInput) -> Tensor:
        residual = torch.embedding(self.network.embed, step.token_ids).to(self._dtype)
        delta: Tensor | None = None
        for layer in self.network.layers:
            delta = layer(residual, delta, step.batch)
        return self._ops.add_rms_norm(residual, delta, self.network.norm, self.config.rms_norm_eps)

    @contextmanager
    def _timed_threads(self, kind: str, rows: int) -> Iterator[None]:
        """Run a pass on as many threads as suit it, and learn from its time.

        Threads are set every time, not only when the number changes: numba's first parallel launch
        sets OpenMP back to all cores, torch's threads with it. Setting costs 0.3 us.
        """
        if self.device.type != "cpu":
            yield
            return
        threads = self._threads.choose(kind, rows)
        self._ops.limit_threads(threads)
        torch.set_num_threads(threads)
        start = time.perf_counter()
        yield
        self._threads.observe(kind, rows, threads, time.perf_counter() - start)
