"""Captured steps: buckets, padding, and the same bits as eager steps, replayed without a card."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import build as builder
from engine.build import BuiltEngine, build_engine
from engine.config import GRID, EngineConfig
from engine.core import EngineCore
from engine.model.batching import step_arrays
from engine.model.graphs import padded
from engine.pools.buffers import StepBuffers
from engine.pools.rollback import RowLayout
from engine.request import GenerationRequest, SamplingParams
from engine.reserve.graphs import (
    GRAPH_STATIC,
    Bucket,
    graph_buckets,
    graph_terms,
    static_bytes,
    uses_graphs,
)
from engine.reserve.ledger import TermKind
from engine.reserve.ssm_reserve import SsmRollbackMode
from engine.runner import RowPhase, Segment
from engine.speculation.policy import ControllerMode, PolicySettings
from engine.weights.model_config import load_config
from kernels.ops import cpu_ops, naive_ops
from tests.engine.tiny_weights import VOCAB, Tensors, text_config, write

DUMMY_SLOT, DUMMY_BLOCK = 9, 77


class Rerun:
    """Stands in for a card: a replay runs the function again, on whatever the buffers hold."""

    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        run()

        def replay() -> None:
            self.replays += 1
            run()

        return replay


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = Tensors()
    tensors.trunk()
    path = tmp_path_factory.mktemp("graphs") / "model"
    return write(path, text_config("qwen3_5"), tensors.mtp())


def build(folder: Path, mode: SsmRollbackMode | None, batch: int = 4) -> BuiltEngine:
    speculation = None
    if mode is not None:
        speculation = PolicySettings(3, mode, controller=ControllerMode.OFF)
    config = EngineConfig(
        str(folder),
        max_batch_size=batch,
        max_seq_len=128,
        memory_budget=2**30,
        threads=1,
        speculation=speculation,
    )
    return build_engine(config, lambda phase, seconds, detail="": None)


def with_graphs(built: BuiltEngine, folder: Path, drafts: int, batch: int = 4) -> Rerun:
    capture = Rerun()
    model = built.model
    rows = batch * (drafts + 1)
    config = EngineConfig(str(folder), max_batch_size=batch, max_seq_len=128)
    buffers = StepBuffers(model.config, config, rows, torch.float32, torch.device("cpu"))
    model._table_width = buffers.table_width
    model.capture(graph_buckets(batch, drafts, rows), buffers, capture)
    return capture


def answers(core: EngineCore) -> dict[int, tuple[int, ...]]:
    """Six requests of odd lengths, greedy and sampled, four at a time."""
    found: dict[int, tuple[int, ...]] = {}
    for number, length in enumerate((1, 3, 65, 30, 2, 7)):
        prompt = tuple((5 * number + 3 * i) % VOCAB for i in range(length))
        params = SamplingParams(
            max_tokens=9 + number, temperature=number % 2, seed=number, ignore_eos=True
        )
        core.add(GenerationRequest(number, prompt, params))
        found[number] = ()
    while core.has_work():
        for delta in core.step():
            assert delta.error is None
            found[delta.request_id] += delta.token_ids
    return found


@pytest.mark.parametrize("mixers", ["cpu", "naive"])
@pytest.mark.parametrize("mode", [None, *SsmRollbackMode])
def test_replayed_steps_have_the_bits_of_eager_ones(
    folder: Path, mode: SsmRollbackMode | None, mixers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mixers == "naive":
        # torch's own products change a row's bits with the number of rows.
        ops = replace(naive_ops(torch.float32), pack_linear=cpu_ops().pack_linear)
        monkeypatch.setattr(builder, "choose_ops", lambda config: ops)
    eager, captured = build(folder, mode), build(folder, mode)
    capture = with_graphs(captured, folder, drafts=0 if mode is None else 3)
    assert answers(captured.core) == answers(eager.core)
    stats = captured.core.stats()
    kinds = dict(stats.steps_by_kind)
    assert capture.replays > 10
    assert (kinds["verify"] > 0) == (mode is not None)
    # Everything that a sequence may own; the dummies hold what padding left.
    for name in ("h", "conv", "ring_inputs", "ring_gates", "checkpoint_h", "snapshot_h"):
        ours, theirs = (getattr(b.model.states, name) for b in (captured, eager))
        last = -1 if name != "snapshot_h" else None
        assert torch.equal(ours[:, :last], theirs[:, :last]), name
    for name in ("k", "v"):
        ours, theirs = (getattr(b.model.kv, name) for b in (captured, eager))
        assert torch.equal(ours[:, :-1], theirs[:, :-1]), name


def test_results_of_one_step_are_those_of_its_rows(folder: Path) -> None:
    eager, captured = build(folder, SsmRollbackMode.CARRY), build(folder, SsmRollbackMode.CARRY)
    with_graphs(captured, folder, drafts=3)
    results = []
    for built in (eager, captured):
        model = built.model
        for slot in (0, 1, 2):
            model.forward([Segment(slot, 0, (1, 2, 3 + slot), RowPhase.PREFILL, 3, (slot,), 1)])
        segments = [
            Segment(0, 3, (4,), RowPhase.DECODE, 1, (0,), 1),
            Segment(1, 3, (5, 6, 7, 8), RowPhase.DECODE, 1, (1,), 4),
            Segment(2, 3, (9, 1), RowPhase.DECODE, 1, (2,), 2),
        ]
        result = model.forward(segments)
        results.append((result.logits.clone(), result.hidden.clone()))
    for ours, theirs in zip(*results, strict=True):
        assert ours.shape[0] == 7
        assert torch.equal(ours, theirs)


def test_a_step_that_no_bucket_holds_runs_eagerly(folder: Path) -> None:
    built = build(folder, None)
    capture = with_graphs(built, folder, drafts=0, batch=2)
    rows = [Segment(slot, 3, (1,), RowPhase.DECODE, 1, (slot,), 1) for slot in range(3)]
    assert built.model.forward(rows[:2]).logits.shape[0] == 2
    assert capture.replays == 1
    assert built.model.forward(rows).logits.shape[0] == 3
    assert built.model.forward([replace(rows[0], phase=RowPhase.REPLAY)]).logits.shape[0] == 1
    assert capture.replays == 1


def test_a_step_is_padded_with_dummies_only() -> None:
    segments = [
        Segment(3, 70, (5,), RowPhase.DECODE, 1, (4, 9), 1),
        Segment(1, 3, (1, 2, 3), RowPhase.DECODE, 1, (6,), 3),
    ]
    layouts = [RowLayout(1), RowLayout(1, ring_first=1, ring_rows=2)]
    pending = np.array([0, 2, 0, 1] + [0] * 6, np.int64)
    arrays = step_arrays(segments, layouts, pending, DUMMY_BLOCK, table_width=3)
    found = padded(arrays, Bucket(rows=8, longest=3), DUMMY_SLOT, DUMMY_BLOCK)
    assert found.token_ids.tolist() == [5, 1, 2, 3, 0, 0, 0, 0]
    assert found.positions.tolist() == [70, 3, 4, 5, 0, 1, 2, 0]
    assert found.row_segment.tolist() == [0, 1, 1, 1, 2, 2, 2, 3]
    assert found.row_start.tolist() == [0, 1, 4, 7, 8, 8, 8, 8, 8]
    assert found.starts.tolist() == [70, 3, 0, 0, 0, 0, 0, 0]
    assert found.slots.tolist() == [3, 1] + [DUMMY_SLOT] * 6
    assert found.committed.tolist() == [1, 1, 3, 1, 0, 0, 0, 0]
    assert found.pending.tolist() == [1, 2, 0, 0, 0, 0, 0, 0]
    assert found.ring_rows.tolist() == [0, 2, 0, 0, 0, 0, 0, 0]
    assert found.snapshots.tolist() == [-1] * 8
    assert found.logit_rows.tolist() == list(range(8))
    assert found.block_tables.tolist() == [
        [4, 9, DUMMY_BLOCK],
        [6, DUMMY_BLOCK, DUMMY_BLOCK],
        [DUMMY_BLOCK] * 3,
        [DUMMY_BLOCK] * 3,
    ]


@pytest.mark.parametrize("longest", [1, 2, 3, 4])
@pytest.mark.parametrize("entries", range(1, 9))
def test_every_mix_of_rows_fits_its_bucket(entries: int, longest: int) -> None:
    for wide in range(entries + 1):
        counts = [longest] * wide + [1] * (entries - wide)
        segments = [
            Segment(i, 5, (0,) * n, RowPhase.DECODE, 1, (i,), n) for i, n in enumerate(counts)
        ]
        layouts = [RowLayout(1) for _ in counts]
        arrays = step_arrays(segments, layouts, np.zeros(9, np.int64), DUMMY_BLOCK)
        for rows in range(sum(counts), 40):
            found = padded(arrays, Bucket(rows, longest), DUMMY_SLOT, DUMMY_BLOCK)
            assert len(found.token_ids) == len(found.slots) == found.row_start[-1] == rows
            assert len(found.row_start) == rows + 1
            assert 1 <= found.longest <= longest


def test_a_full_bucket_needs_no_padding() -> None:
    segments = [Segment(i, 5, (3,), RowPhase.DECODE, 1, (i,), 1) for i in range(4)]
    layouts = [RowLayout(1)] * 4
    arrays = step_arrays(segments, layouts, np.zeros(9, np.int64), DUMMY_BLOCK)
    assert padded(arrays, Bucket(4, 1), DUMMY_SLOT, DUMMY_BLOCK) is arrays
    assert arrays.logit_rows.tolist() == [0, 1, 2, 3]


def test_buckets_are_few_and_hold_every_decode_step() -> None:
    buckets = graph_buckets(24, 3, 24 + 72)
    assert [b.rows for b in buckets if b.longest == 1] == [24, 16, 8, 4, 2, 1]
    assert [b.rows for b in buckets if b.longest == 2] == [48, 32, 16, 8, 4, 2]
    assert [b.rows for b in buckets if b.longest == 4] == [96, 64, 32, 16, 8, 4]
    assert [b.rows for b in buckets] == sorted((b.rows for b in buckets), reverse=True)
    assert graph_buckets(1, 0, 1) == (Bucket(1, 1),)
    assert max(b.rows for b in graph_buckets(128, 3, 224)) == 224


def test_the_buffers_take_what_the_ledger_says(folder: Path) -> None:
    model = load_config(folder)
    config = EngineConfig(
        str(folder),
        device="cuda",
        dtype="bfloat16",
        kernels="triton",
        max_batch_size=7,
        max_seq_len=3 * GRID - 1,
    )
    terms = {t.name: t for t in graph_terms(model, config, 2, 21, 100)}
    buffers = StepBuffers(model, config, 21, torch.bfloat16, torch.device("cpu"))
    assert terms[GRAPH_STATIC].bytes == buffers.nbytes == static_bytes(model, config, 21)
    assert terms[GRAPH_STATIC].kind is TermKind.EXACT
    assert len(buffers.indices) == 13 * 22 + 22 + 64


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"device": "cuda", "kernels": "triton"}, True),
        ({"device": "cuda", "kernels": "triton", "enforce_eager": True}, False),
        ({"device": "cuda", "kernels": "naive"}, False),
        ({}, False),
    ],
)
def test_graphs_run_on_a_card_unless_told_otherwise(fields: dict[str, Any], expected: bool) -> None:
    config = EngineConfig("m", **fields)
    assert uses_graphs(config) is expected
