"""Small checks of chosen operators on the machine at hand: against naive.py, and row by row.

For `spark doctor`; shapes are tiny, so that a wrong answer shows and a slow one does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from kernels.attention.types import AttentionParams, KvPages
from kernels.batch import RaggedBatch
from kernels.cases import relative_error
from kernels.draft_chain.naive import draft_chain as naive_draft_chain
from kernels.draft_chain.types import ChainStart, ChainWeights
from kernels.gdn.types import GdnParams, GdnState
from kernels.moe.naive import Expert, MoeParams
from kernels.ops import Linear, Ops, chosen, naive_ops
from kernels.ragged import Rows, blocks_by_slot, ragged_batch

Params = TypeVar("Params")
State = TypeVar("State")
Item = TypeVar("Item")

# Largest ||out - truth|| / ||truth|| over every result of an operator.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
WIDTH, INNER, VOCAB = 64, 48, 131
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
PAGE, BLOCKS, SLOTS, RING = 64, 3, 9, 3
# Rows at once, against the same rows among the most.
COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 13, 14, 20)
MOST_ROWS = 24


@dataclass(frozen=True, slots=True)
class OperatorResult:
    """One operator: its implementation, its error, and the largest that is allowed."""

    operator: str
    form: str
    error: float
    tolerance: float

    @property
    def right(self) -> bool:
        """Whether it agrees with naive.py."""
        return self.error <= self.tolerance


@dataclass(frozen=True, slots=True)
class RowsResult:
    """Whether rows have the same bits alone and among others; `different` lists where not."""

    what: str
    different: tuple[str, ...]


_MOE_SHAPES = (
    (4, WIDTH),
    (4, 2 * INNER, WIDTH),
    (4, WIDTH, INNER),
    (2 * INNER, WIDTH),
    (WIDTH, INNER),
    (1, WIDTH),
)
# Under which name `chosen` has an operator, where it is not that of its folder.
_FIELDS = {
    "rms_norm": "add_rms_norm",
    "gdn": "gdn_mixer",
    "attention": "attention_mixer",
    "moe": "moe_mlp",
    "moves": "move_rows",
}
# A prompt beside a short one; decodes; verifies that leave rows in the ring, two over pending rows.
_STEPS = (
    (Rows(0, 0, 67, 67, chunked=True), Rows(2, 0, 3, 3, chunked=True)),
    tuple(Rows(slot, 64 + slot, 1, 1) for slot in (0, 2, 5, 7)),
    (Rows(0, 80, 4, 1, pending=2), Rows(4, 66, 2, 1), Rows(7, 90, 1, 1, pending=1)),
)


class SelfTest:
    """The checks of one set of operators.

    Args:
        ops: as the engine would choose them.
        device: where they run.
        dtype: of the activations.
    """

    def __init__(self, ops: Ops, device: torch.device, dtype: torch.dtype) -> None:
        self._ops = ops
        self._truth = naive_ops(dtype)
        self._device = device
        self._dtype = dtype
        self._generator = torch.Generator().manual_seed(20)

    def operators(self) -> Iterator[OperatorResult]:
        """Every operator against naive.py."""
        forms = chosen(self._ops)
        for name, run in self._runs().items():
            made, truth = (run(ops) for ops in (self._ops, self._truth))
            error = relative_error(made, truth)
            yield OperatorResult(
                name, forms[_FIELDS.get(name, name)], error, TOLERANCE[self._dtype]
            )
        if self._ops.draft_chain is not None:
            weights, start = self._chain()
            truth = [torch.from_numpy(a) for a in naive_draft_chain(_copy(weights), start)]
            made = [torch.from_numpy(a) for a in self._ops.draft_chain(weights)(start)]
            error = relative_error(made, truth)
            from kernels.draft_chain.cpu import TOLERANCE as ROUNDED

            # Its own bounds rows of 256 numbers; the fewer there are, the less roundings cancel.
            yield OperatorResult("draft_chain", forms["draft_chain"], error, 2 * ROUNDED)

    def run(self, operator: str) -> None:
        """Run one of them once, which compiles it, and compare nothing."""
        if operator != "draft_chain":
            self._runs()[operator](self._ops)
        elif self._ops.draft_chain is not None:
            weights, start = self._chain()
            self._ops.draft_chain(weights)(start)

    def rows(self) -> Iterator[RowsResult]:
        """Rows alone and among others: every form of product, and both mixers."""
        forms: dict[str, list[tuple[int, Linear]]] = {}
        for weight in (
            self._random(2 * INNER, WIDTH).bfloat16(),
            # Sizes that are no whole number of somebody's tiles.
            self._random(VOCAB, WIDTH).bfloat16(),
            self._random(VOCAB, WIDTH - 16).bfloat16(),
            self._random(VOCAB, WIDTH),
        ):
            linear = self._ops.pack_linear(weight.to(self._device))
            dtype = str(weight.dtype).removeprefix("torch.")
            kind = f"linear {dtype} ({getattr(linear, 'form', '?')})"
            forms.setdefault(kind, []).append((weight.shape[1], linear))
        for kind, linears in forms.items():
            yield self._linear_rows(kind, linears)
        yield self._mixer_rows("gdn", self._gdn_alone)
        yield self._mixer_rows("attention", self._attention_alone)

    def _runs(self) -> dict[str, Callable[[Ops], Sequence[Tensor]]]:
        x, y = self._activations(7, WIDTH), self._activations(7, WIDTH)
        scale, other = (1 + 0.1 * self._random(WIDTH) for _ in range(2))
        wide = self._activations(5, 2 * INNER)
        weights = [self._random(size, WIDTH).bfloat16() for size in (VOCAB, 2 * INNER)]
        logits = self._random(6, VOCAB).float() * 3
        params, state, proj = self._gdn()
        attention, pages, qkv = self._attention()
        steps = [self._batch(rows) for rows in _STEPS]
        moe = [self._random(*shape) for shape in _MOE_SHAPES]

        def norms(ops: Ops) -> list[Tensor]:
            residual = x.clone()
            out = ops.add_rms_norm(residual, y, scale, 1e-6)
            return [out, residual, ops.join_norms(x, scale, y, other, 1e-6)]

        def top(ops: Ops) -> list[Tensor]:
            ids, logprobs = ops.top1(logits)
            return [ids, logprobs]

        def gdn(ops: Ops) -> list[Tensor]:
            own = _copy(state)
            out = [ops.gdn_mixer(proj[: len(b.positions)], params, own, b) for b in steps]
            return [*out, own.h, own.conv]

        def attend(ops: Ops) -> list[Tensor]:
            own = _copy(pages)
            some = torch.tensor([2, 0], device=self._device)
            out = [
                ops.attention_mixer(qkv[: len(b.positions)], attention, own, b, wanted)
                for b, wanted in ((steps[0], None), (steps[1], None), (steps[2], some))
            ]
            return [*out, own.k, own.v]

        def moves(ops: Ops) -> list[Tensor]:
            own = state.h[None].clone()
            index = [torch.tensor(n, device=self._device) for n in ([0, 4], [5, 1])]
            ops.move_rows([own], [own], *index)
            return [own]

        return {
            "linear": lambda ops: [ops.pack_linear(weight)(x) for weight in weights],
            "rms_norm": norms,
            "silu_mul": lambda ops: [ops.silu_mul(wide)],
            "gdn": gdn,
            "attention": attend,
            "moe": lambda ops: [ops.moe_mlp(x, _moe(ops, moe), ops.silu_mul)],
            "top1": top,
            "moves": moves,
        }

    def _linear_rows(self, name: str, linears: Sequence[tuple[int, Linear]]) -> RowsResult:
        """Products of one form, each with the width of its input."""
        inputs = [(linear, self._activations(MOST_ROWS, width)) for width, linear in linears]
        whole = [(linear, x, linear(x)) for linear, x in inputs]
        wrong = (
            f"{n} rows"
            for n in COUNTS
            if any(not torch.equal(linear(x[:n]), out[:n]) for linear, x, out in whole)
        )
        return RowsResult(name, tuple(wrong))

    def _mixer_rows(self, name: str, run: Callable[[list[Rows]], list[Tensor]]) -> RowsResult:
        """Decode rows of many sequences against each alone, and a verify against plain steps."""
        together = [Rows(slot, 65 + slot, 1, 1) for slot in range(SLOTS - 1)]
        wrong = []
        for count in range(1, SLOTS):
            out = run(together[:count])
            for slot, row in enumerate(together[:count]):
                if not torch.equal(run([row])[0][0], out[0][slot]):
                    wrong.append(f"{count} sequences")
                    break
        verify = run([Rows(1, 70, 3, 3)])
        plain = [run([Rows(1, 70, n, n)])[0][n - 1] for n in (1, 2, 3)]
        if not torch.equal(verify[0], torch.stack(plain)):
            wrong.append("3 rows of one sequence")
        return RowsResult(name, tuple(wrong))

    def _gdn_alone(self, rows: list[Rows]) -> list[Tensor]:
        params, state, proj = self._seeded(self._gdn)
        picked = torch.cat([proj[8 * r.slot : 8 * r.slot + r.count] for r in rows])
        return [self._ops.gdn_mixer(picked, params, state, self._batch(rows))]

    def _attention_alone(self, rows: list[Rows]) -> list[Tensor]:
        params, pages, qkv = self._seeded(self._attention)
        picked = torch.cat([qkv[8 * r.slot : 8 * r.slot + r.count] for r in rows])
        return [self._ops.attention_mixer(picked, params, pages, self._batch(rows), None)]

    def _seeded(
        self, make: Callable[[], tuple[Params, State, Tensor]]
    ) -> tuple[Params, State, Tensor]:
        """The same numbers at every call."""
        self._generator.manual_seed(21)
        return make()

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator).to(self._device)

    def _activations(self, *shape: int) -> Tensor:
        return self._random(*shape).to(self._dtype)

    def _gdn(self) -> tuple[GdnParams, GdnState, Tensor]:
        params = GdnParams(
            conv=self._random(4, 2 * 2 * 16 + 4 * 16) * 0.5,
            decay=-(0.1 + self._random(4).abs()),
            dt_bias=self._random(4) * 0.5,
            norm=1 + self._random(16) * 0.1,
            key_heads=2,
            value_heads=4,
            key_width=16,
            value_width=16,
            eps=1e-6,
        )
        gates = torch.stack((-self._random(SLOTS, RING, 4).abs(), self._random(SLOTS, RING, 4)), 2)
        state = GdnState(
            h=self._random(SLOTS, 4, 16, 16) * 0.3,
            conv=self._random(SLOTS, params.conv_dim, 4),
            ring_inputs=self._random(SLOTS, RING, params.conv_dim),
            ring_gates=torch.cat((gates[:, :, :1], gates[:, :, 1:].sigmoid()), 2).contiguous(),
            snapshot_h=self._random(1, 4, 16, 16),
            snapshot_conv=self._random(1, RING + 1, params.conv_dim, 4),
        )
        return params, state, self._activations(80, params.conv_dim + params.value_dim + 8)

    def _attention(self) -> tuple[AttentionParams, KvPages, Tensor]:
        half = HEAD_DIM // 8
        turns = 10000.0 ** (-torch.arange(half) / half)
        angle = (torch.arange(PAGE * BLOCKS)[:, None] * turns).to(self._device)
        params = AttentionParams(
            q_norm=1 + self._random(HEAD_DIM) * 0.1,
            k_norm=1 + self._random(HEAD_DIM) * 0.1,
            cos=angle.cos(),
            sin=angle.sin(),
            heads=HEADS,
            kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            eps=1e-6,
        )
        blocks = SLOTS * BLOCKS + 1
        pages = KvPages(
            k=self._activations(blocks, KV_HEADS, HEAD_DIM, PAGE),
            v=self._activations(blocks, KV_HEADS, PAGE, HEAD_DIM),
        )
        return params, pages, self._activations(80, 2 * (HEADS + KV_HEADS) * HEAD_DIM)

    def _chain(self) -> tuple[ChainWeights, ChainStart]:
        attention, pages, _ = self._attention()

        def matrix(rows: int, columns: int) -> Tensor:
            return self._random(rows, columns).div(columns**0.5).bfloat16()

        def scale() -> Tensor:
            return 1 + 0.1 * self._random(WIDTH)

        weights = ChainWeights(
            embed=matrix(2 * WIDTH, WIDTH),
            fc=matrix(WIDTH, 2 * WIDTH),
            qkv=matrix(2 * (HEADS + KV_HEADS) * HEAD_DIM, WIDTH),
            o=matrix(WIDTH, HEADS * HEAD_DIM),
            gate_up=matrix(2 * INNER, WIDTH),
            down=matrix(WIDTH, INNER),
            head=matrix(2 * WIDTH, WIDTH) * 4,
            norm_embedding=scale(),
            norm_hidden=scale(),
            input_norm=scale(),
            post_norm=scale(),
            norm=scale(),
            attention=attention,
            pages=pages,
        )
        start = ChainStart(
            tokens=np.array([3, 9], np.int64),
            hidden=self._random(2, WIDTH),
            row_start=np.array([0, 1, 2], np.int64),
            begins=np.array([62, 70], np.int64),
            first_hidden=np.array([0, 1], np.int64),
            block_tables=np.arange(2 * BLOCKS).reshape(2, BLOCKS),
            first_key=np.zeros(2, np.int64),
            depths=np.array([3, 3], np.int64),
        )
        return weights, start

    def _batch(self, rows: Sequence[Rows]) -> RaggedBatch:
        return ragged_batch(rows, blocks_by_slot(rows, BLOCKS), self._device)


def _copy(item: Item) -> Item:
    """A dataclass of tensors with copies of them, and of those inside."""
    made: dict[str, Any] = {}
    for field in fields(item):  # type: ignore[arg-type]
        value = getattr(item, field.name)
        if isinstance(value, Tensor):
            made[field.name] = value.clone()
        else:
            made[field.name] = _copy(value) if isinstance(value, KvPages) else value
    return type(item)(**made)


def _moe(ops: Ops, weights: Sequence[Tensor]) -> MoeParams:
    router, gate_up, down, shared_gate_up, shared_down, gate = weights
    return MoeParams(
        router=ops.pack_linear(router),
        experts=ops.pack_experts(gate_up, down),
        shared=Expert(ops.pack_linear(shared_gate_up), ops.pack_linear(shared_down)),
        shared_gate=ops.pack_linear(gate),
        top_k=2,
        renormalise=True,
    )
