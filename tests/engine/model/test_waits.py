"""How often a step waits for a card, and what it copies there: counted on tensors without a card.

The tensors have a shape and no numbers, so that a read which nobody thought of raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import engine.model.drafter as drafter_module
import engine.sampling.on_device as on_device
from engine.config import EngineConfig
from engine.model.hybrid import HybridModel
from engine.model.load import load_network
from engine.pools.allocate import allocate_pools
from engine.pools.buffers import StepBuffers
from engine.pools.snapshots import StateSnapshots
from engine.request import SamplingParams
from engine.reserve.graphs import graph_buckets
from engine.reserve.ssm_reserve import SpeculationPolicy, SsmRollbackMode
from engine.runner import DraftRows, PlainRows, RowPhase, Segment, Verified
from engine.sampling.sampler import Sampler
from engine.sampling.state import SamplingRow, SamplingState
from engine.warmup import warm_up
from engine.weights.model_config import load_config
from kernels.ops import Ops, naive_ops
from tests.engine.tiny_weights import VOCAB, Tensors, text_config, write

CARD = torch.device("meta")


def shapes_only() -> Ops:
    """Operators that give the right shapes and read nothing, as kernels on a card do."""

    def gdn(proj: Tensor, params: Any, state: Any, batch: Any) -> Tensor:
        return proj.new_empty(proj.shape[0], params.value_dim)

    def attention(qkv: Tensor, params: Any, pages: Any, batch: Any, wanted: Any = None) -> Tensor:
        rows = qkv.shape[0] if wanted is None else wanted.shape[0]
        return qkv.new_empty(rows, params.heads * params.head_dim)

    def move(sources: Any, targets: Any, src: Tensor, dst: Tensor) -> None:
        assert src.device == dst.device == CARD

    return replace(
        naive_ops(torch.bfloat16), gdn_mixer=gdn, attention_mixer=attention, move_rows=move
    )


@dataclass
class Copies(TorchDispatchMode):
    """Counts copies between host and card, and reads of single numbers."""

    up: int = 0
    down: int = 0
    reads: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if "item" in name or "local_scalar" in name or "nonzero" in name:
            self.reads.append(name)
        if "aten.index" in name and args[0].device == CARD:
            # An index on the host makes a copy that the host waits for.
            places = args[1] if isinstance(args[1], list | tuple) else [args[2]]
            if any(isinstance(i, Tensor) and i.device != CARD for i in places):
                self.reads.append(name)
        out = func(*args, **(kwargs or {}))
        if name.startswith(("aten._to_copy", "aten.to.", "aten.copy_")):
            source = args[1] if ".copy_" in name else args[0]
            if source.device != out.device:
                self.up += out.device == CARD
                self.down += source.device == CARD
        return out


class Lists(TorchFunctionMode):
    """Counts indices that are no tensors of the card: each makes a copy that the host waits for."""

    def __init__(self, reads: list[str]) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.__getitem__, Tensor.__setitem__) and args[0].device == CARD:
            places = args[1] if isinstance(args[1], tuple) else (args[1],)
            self._reads += [f"index {p}" for p in places if isinstance(p, list | np.ndarray)]
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Copies]:
    with Copies() as copies, Lists(copies.reads):
        yield copies


@dataclass
class Fetches:
    """Stands in for `fetch`: counts, and answers with zeros."""

    count: int = 0

    def __call__(self, *tensors: Tensor) -> list[Any]:
        self.count += 1
        return [_Zeros(tuple(tensor.shape)) for tensor in tensors]


class _Zeros:
    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def tolist(self) -> Any:
        if len(self.shape) == 1:
            return [0] * self.shape[0]
        return [[1] * self.shape[1]] * self.shape[0]


@pytest.fixture
def fetches(monkeypatch: pytest.MonkeyPatch) -> Fetches:
    found = Fetches()
    monkeypatch.setattr(drafter_module, "fetch", found)
    monkeypatch.setattr(on_device, "fetch", found)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = Tensors()
    tensors.trunk()
    path = tmp_path_factory.mktemp("waits") / "model"
    return write(path, text_config("qwen3_5"), tensors.mtp())


def on_a_card(folder: Path, mode: SsmRollbackMode) -> HybridModel:
    """The model with its pools on the card."""
    config = load_config(folder)
    policy = SpeculationPolicy(3, mode)
    limits = EngineConfig(str(folder), device="meta", max_batch_size=4, max_seq_len=128)
    ops = shapes_only()
    pools = allocate_pools(config, limits, policy, 8, torch.bfloat16, ops.move_rows)
    network = load_network(folder, config, pools, ops, 128, with_mtp=True)
    return HybridModel(config, network, pools, ops, torch.bfloat16, 1, mode, table_width=2)


def tensors_below(owner: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that can be reached from `owner` through objects of ours."""
    if isinstance(owner, Tensor):
        yield path, owner
    module = type(owner).__module__
    ours = isinstance(owner, tuple | list) or module.startswith(("engine.", "kernels."))
    if id(owner) in seen or not ours:
        return
    seen.add(id(owner))
    if isinstance(owner, tuple | list):
        parts = [(f"{path}[{i}]", each) for i, each in enumerate(owner)]
    else:
        names = [*getattr(owner, "__dict__", ()), *getattr(owner, "__dataclass_fields__", ())]
        parts = [(f"{path}.{name}", getattr(owner, name)) for name in names]
    for name, part in parts:
        yield from tensors_below(part, name, seen)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_everything_lies_on_the_card(tmp_path: Path, family: str) -> None:
    tensors = Tensors(moe=family.endswith("moe"))
    tensors.trunk()
    folder = write(tmp_path / "model", text_config(family), tensors.mtp())
    found = list(tensors_below(on_a_card(folder, SsmRollbackMode.SNAPSHOT), "model", set()))
    assert len(found) > 60
    assert [name for name, tensor in found if tensor.device != CARD] == []


def rows_of(segments: list[Segment]) -> list[SamplingRow]:
    """A greedy, a drawn and a filtered request in turn, one row for every logits row."""
    kinds = [{"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 0.7, "top_p": 0.9}]
    found = []
    for number, segment in enumerate(segments):
        params = SamplingParams(max_tokens=9, seed=number, **kinds[number % 3])
        state = SamplingState(params, (1,), [], frozenset())
        found += [SamplingRow(state, i) for i in range(segment.logit_rows)]
    return found


def decode(slot: int, rows: int) -> Segment:
    return Segment(slot, 5, (1,) * rows, RowPhase.DECODE, 1, (slot,), rows)


STEPS: dict[str, list[Segment]] = {
    "decode": [decode(slot, 1) for slot in range(4)],
    "verify": [decode(0, 4), decode(1, 3), decode(2, 1)],
    "prefill": [Segment(0, 0, (1,) * 64, RowPhase.PREFILL, 64, (0,), 1), decode(1, 1)],
}


@pytest.mark.parametrize("mode", list(SsmRollbackMode))
@pytest.mark.parametrize("step", list(STEPS))
def test_a_step_waits_once_for_its_tokens(
    folder: Path, step: str, mode: SsmRollbackMode, fetches: Fetches
) -> None:
    segments = STEPS[step]
    model = on_a_card(folder, mode)
    with counted() as copies:
        result = model.forward(segments)
        assert result.logits.device == CARD
        moves = 1 if step == "verify" and mode is not SsmRollbackMode.CARRY else 0
        assert copies.up == 1 + moves, "the index arrays travel together"
        Sampler(VOCAB).sample(result.logits, rows_of(segments))
        verified = [Verified(s.slot, len(s.token_ids), 1) for s in segments if len(s.token_ids) > 1]
        if step == "verify":
            model.accept(verified)
    assert fetches.count == 1
    assert (copies.down, copies.reads) == (0, [])


@pytest.mark.parametrize("drafts", [(3, 3, 3), (3, 1, 2)])
def test_drafting_waits_once_for_all_drafts(
    folder: Path, drafts: tuple[int, ...], fetches: Fetches
) -> None:
    model = on_a_card(folder, SsmRollbackMode.CARRY)
    with counted() as copies:
        hidden = model.forward([decode(slot, 1) for slot in range(4)]).hidden
        both, fives = np.arange(2), np.full(2, 5)
        model.remember(PlainRows(both, fives, both, [7, 8]), hidden)
        model.claim_slot(2)
        model.claim_slot(3)
        model.remember(PlainRows(both + 2, fives, None, [7, 8]), hidden[2:])
        late = DraftRows(3, 6, 3, (4,), (3,), engaged=False, drafts=0)
        rows = [
            DraftRows(slot, 6, slot, (9,), (slot,), engaged=True, drafts=n)
            for slot, n in enumerate(drafts)
        ]
        proposals = model.draft([*rows, late], hidden)
    assert [len(p.tokens) for p in proposals] == [*drafts, 0]
    assert fetches.count == 1
    assert (copies.down, copies.reads) == (0, [])


@pytest.mark.parametrize("step", ["decode", "verify"])
def test_a_replayed_step_copies_once_and_waits_for_nothing(folder: Path, step: str) -> None:
    model = on_a_card(folder, SsmRollbackMode.CARRY)
    config = EngineConfig(str(folder), device="meta", max_batch_size=4, max_seq_len=128)
    buffers = StepBuffers(model.config, config, 16, torch.bfloat16, CARD)
    replays: list[int] = []

    def capture(run: Callable[[], None]) -> Callable[[], None]:
        run()
        return lambda: replays.append(1)

    model.capture(graph_buckets(4, 3, 16), buffers, capture)
    with counted() as copies:
        result = model.forward(STEPS[step])
    rows = sum(len(s.token_ids) for s in STEPS[step])
    assert (result.logits.shape[0], result.hidden.shape[0]) == (rows, rows)
    assert (len(replays), copies.up, copies.down, copies.reads) == (1, 1, 0, [])


@pytest.mark.parametrize("mode", list(SsmRollbackMode))
@pytest.mark.parametrize("drafts", [0, 3])
def test_the_warm_up_of_a_card_waits_for_drafts_only(
    folder: Path, mode: SsmRollbackMode, drafts: int, fetches: Fetches
) -> None:
    model = on_a_card(folder, mode)
    config = EngineConfig(str(folder), device="meta", max_batch_size=4, max_seq_len=128)
    with counted() as copies:
        warm_up(model, config, drafts, StateSnapshots(model.states, 4))
    assert (copies.down, copies.reads) == (0, [])
    assert fetches.count == (drafts + 2 if drafts else 0)


def test_moving_a_sequence_waits_for_nothing(folder: Path, fetches: Fetches) -> None:
    model = on_a_card(folder, SsmRollbackMode.CARRY)
    with counted() as copies:
        model.states.pending[3] = 2
        model.move_slot(3, 0)
    assert (fetches.count, copies.down, copies.reads) == (0, 0, [])


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.tolist(),
        lambda x: float(x[0]),
        lambda x: x.nonzero(),
        lambda x: x.cpu(),
        lambda x: x[x > 0],
        lambda x: x[[0, 2]],
    ],
)
def test_a_read_would_be_noticed(read: Callable[[Tensor], object]) -> None:
    numbers = torch.empty(3, device=CARD)
    with counted() as copies:
        try:
            read(numbers)
        except Exception as error:
            copies.reads.append(str(error))
    assert copies.down or copies.reads
