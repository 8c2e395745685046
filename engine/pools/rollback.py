"""How a verify gets rid of rejected rows: three modes behind one interface (SPEC section 8).

Knows slots and rows, not which tokens were right: that comes in as a count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.pools.snapshots import StateSnapshots
from engine.pools.state import SsmStatePool
from engine.reserve.ssm_reserve import SsmRollbackMode
from engine.runner import Verified


@dataclass(frozen=True, slots=True)
class RowLayout:
    """What the GDN kernel does with a segment's rows; see kernels.batch.RaggedBatch."""

    committed: int
    ring_first: int = 0
    ring_rows: int = 0
    snapshot: int = -1


# Runs the pending rows of the slots on their states.
Fold = Callable[[Sequence[int]], None]


class Rollback(Protocol):
    """One mode, over one state pool."""

    def layout(self, slot: int, rows: int) -> RowLayout:
        """How to run a verify of `rows` rows, the first of which is final."""
        ...

    def before(self, slots: Sequence[int]) -> None:
        """The slots are about to be verified."""
        ...

    def undo(self, slots: Sequence[int]) -> None:
        """The verify of these slots raised; return to the state before it where there is one."""
        ...

    def after(self, verified: Sequence[Verified]) -> list[int]:
        """Keep what was emitted; returns the slots whose pending rows must be folded in now."""
        ...

    def export(self, verified: Verified, wanted: int, place: int, fold: Fold) -> None:
        """Copy the state behind the first `wanted` rows of a verify to `place` of the snapshots.

        Comes after `after` and before the slot's next forward, which is none the wiser. `wanted` is
        at least 1 and at most what was emitted.
        """
        ...


class _Mode:
    """What every mode works on: the state pool, and the snapshots that states are copied to."""

    def __init__(self, states: SsmStatePool, snapshots: StateSnapshots) -> None:
        self._states = states
        self._snapshots = snapshots


class Carry(_Mode):
    """No unverified row touches the state: accepted ones wait in the ring for the next step."""

    def layout(self, slot: int, rows: int) -> RowLayout:
        """Row 0 on the stored state, the others on a copy and into the ring."""
        return RowLayout(committed=1, ring_first=1, ring_rows=rows - 1)

    def before(self, slots: Sequence[int]) -> None:
        """Nothing to save."""

    def undo(self, slots: Sequence[int]) -> None:
        """Nothing was saved."""

    def after(self, verified: Sequence[Verified]) -> list[int]:
        """The rows that came true are pending; the last emitted token is the next step's row 0."""
        for slot, _, emitted in verified:
            self._states.pending[slot] = emitted - 1
        return []

    def export(self, verified: Verified, wanted: int, place: int, fold: Fold) -> None:
        """The state stands behind row 0: fold as many pending rows as are wanted, keep the rest."""
        states, slot, folded = self._states, verified.slot, wanted - 1
        rest = verified.emitted - wanted
        states.pending[slot] = folded
        if folded:
            fold([slot])
        self._snapshots.save(slot, place)
        if folded and rest:
            for ring in (states.ring_inputs, states.ring_gates):
                ring[:, slot, :rest] = ring[:, slot, folded : folded + rest].clone()
            states.bytes_moved += 2 * rest * states.ring_row_bytes
        states.pending[slot] = rest


class _Checkpointed(_Mode):
    """What snapshot and replay share: the state before the verify is kept."""

    def __init__(self, states: SsmStatePool, snapshots: StateSnapshots) -> None:
        super().__init__(states, snapshots)
        self._live = (states.h, states.conv)
        self._kept = (states.checkpoint_h, states.checkpoint_conv)

    def before(self, slots: Sequence[int]) -> None:
        """Copy the states of the slots to their checkpoints."""
        self._copy(self._live, self._kept, slots)

    def undo(self, slots: Sequence[int]) -> None:
        """Copy them back."""
        self._copy(self._kept, self._live, slots)

    def _copy(
        self, source: Sequence[Tensor], target: Sequence[Tensor], slots: Sequence[int]
    ) -> None:
        self._states.copy(source, target, slots, slots)
        self._states.bytes_moved += 2 * self._states.blob_bytes * len(slots)


class Replay(_Checkpointed):
    """All rows run on the stored state; after a partial accept the right ones are run again."""

    def layout(self, slot: int, rows: int) -> RowLayout:
        """Everything on the stored state; the inputs of all rows but the last are kept."""
        return RowLayout(committed=rows, ring_first=0, ring_rows=rows - 1)

    def after(self, verified: Sequence[Verified]) -> list[int]:
        """Back to the checkpoint, from which `emitted` rows of the ring are to be folded."""
        partial = [v for v in verified if v.emitted < v.rows]
        if partial:
            self.undo([v.slot for v in partial])
        for v in partial:
            self._states.pending[v.slot] = v.emitted
        return [v.slot for v in partial]

    def export(self, verified: Verified, wanted: int, place: int, fold: Fold) -> None:
        """Before the last emitted row: the checkpoint, from which the wanted rows are folded."""
        slot = verified.slot
        self._snapshots.save(slot, place)
        if wanted < verified.emitted:
            self.undo([slot])
            self._states.pending[slot] = wanted
            fold([slot])
            self._snapshots.swap(slot, place)


class Snapshot(_Checkpointed):
    """Every row leaves its state behind, and the commit picks one."""

    def layout(self, slot: int, rows: int) -> RowLayout:
        """Everything on the stored state, with a snapshot after every row but the last."""
        return RowLayout(committed=rows, snapshot=self._states.first_place[slot])

    def after(self, verified: Sequence[Verified]) -> list[int]:
        """After a partial accept the state is the snapshot behind the last emitted row."""
        states = self._states
        partial = [v for v in verified if v.emitted < v.rows]
        if partial:
            slots = [v.slot for v in partial]
            places = [states.first_place[v.slot] + v.emitted - 1 for v in partial]
            states.copy([states.snapshot_h], [states.h], places, slots)
            depth = states.snapshot_conv.shape[2]
            places = [v.slot * depth + v.emitted - 1 for v in partial]
            states.copy([states.snapshot_conv.flatten(1, 2)], [states.conv], places, slots)
            states.bytes_moved += 2 * states.blob_bytes * len(partial)
        return []

    def export(self, verified: Verified, wanted: int, place: int, fold: Fold) -> None:
        """Before the last row: the snapshot behind the wanted one."""
        states, slot = self._states, verified.slot
        if wanted == verified.emitted:
            self._snapshots.save(slot, place)
            return
        depth = states.snapshot_conv.shape[2]
        self._snapshots.put(
            (states.snapshot_h, states.first_place[slot] + wanted - 1),
            (states.snapshot_conv.flatten(1, 2), slot * depth + wanted - 1),
            place,
        )


def rollback_of(mode: SsmRollbackMode, states: SsmStatePool, snapshots: StateSnapshots) -> Rollback:
    """The strategy for a mode; `snapshots` is where `export` copies states to."""
    kinds: dict[SsmRollbackMode, type[Carry] | type[Replay] | type[Snapshot]] = {
        SsmRollbackMode.CARRY: Carry,
        SsmRollbackMode.REPLAY: Replay,
        SsmRollbackMode.SNAPSHOT: Snapshot,
    }
    return kinds[mode](states, snapshots)
