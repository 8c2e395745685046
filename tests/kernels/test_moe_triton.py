"""The Triton mixture of experts: routing, tiles, products, and rows that do not see each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.cases import relative_error
from kernels.errors import UnsupportedKernelError
from kernels.linear.naive import PlainLinear
from kernels.linear.triton import TritonLinear
from kernels.moe import naive
from kernels.moe.naive import Expert, MoeParams
from kernels.moe.triton import moe_mlp, pack_experts
from kernels.moe.triton_route import BLOCK_M, make_tiles, most_tiles, route
from kernels.silu_mul.naive import silu_mul as naive_silu_mul
from kernels.silu_mul.triton import silu_mul
from tests.kernels.poison import DEVICE, poisoned_empty

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
EXPERTS, TOP_K, WIDTH, INNER = 6, 3, 24, 20


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(*shape, generator=generator) * shape[-1] ** -0.5
    return made.to(dtype).to(DEVICE)


def moe_params(dtype: torch.dtype = torch.float32, wide: bool = False) -> MoeParams:
    """Stacked experts, and linears whose rows do not see each other; `wide`: all in float64."""

    def weight(*shape: int, seed: int) -> Tensor:
        made = random(*shape, seed=seed, dtype=dtype)
        return made.double() if wide else made

    def linear(*shape: int, seed: int) -> PlainLinear | TritonLinear:
        made = weight(*shape, seed=seed)
        return TritonLinear(made) if made.dtype == torch.float32 else PlainLinear(made)

    gate_up = weight(EXPERTS, 2 * INNER, WIDTH, seed=2)
    down = weight(EXPERTS, WIDTH, INNER, seed=3)
    router = TritonLinear(random(EXPERTS, WIDTH, seed=1, dtype=dtype).float() * 3)
    stacked = naive.StackedExperts(gate_up, down)
    return MoeParams(
        # Of float32 either way, so that both choose the same experts.
        router=lambda x: router(x.float()).to(torch.float64 if wide else torch.float32),
        experts=stacked if wide else pack_experts(gate_up, down, dtype),
        shared=Expert(linear(2 * 7, WIDTH, seed=4), linear(WIDTH, 7, seed=5)),
        shared_gate=linear(1, WIDTH, seed=6),
        top_k=TOP_K,
        renormalise=True,
    )


def rows(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (random(count, WIDTH, seed=9) * WIDTH**0.5).to(dtype)


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (5, 2), (256, 8), (3, 3)])
def test_routing(
    experts: int, top_k: int, renormalise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned_empty(monkeypatch)
    logits = random(4, experts, seed=3) * 20
    weights, ids = route(logits, top_k, renormalise)
    want, chosen = naive.route(logits.double(), top_k, renormalise)
    order = chosen.argsort(-1)
    assert torch.equal(ids.long(), chosen.gather(-1, order))
    assert relative_error([weights], [want.gather(-1, order)]) < 1e-6


def test_equal_logits_choose_the_lower_expert() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0], [0.0] * 5], device=DEVICE)
    weights, ids = route(logits, 2, renormalise=True)
    assert ids.tolist() == [[1, 2], [0, 1]]
    assert weights.tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_nan_chooses_experts_that_exist_and_shows() -> None:
    logits = torch.full((2, 5), float("nan"), device=DEVICE)
    logits[0, 3] = 1.0
    weights, ids = route(logits, 3, renormalise=True)
    assert ids.tolist() == [[0, 1, 3], [0, 1, 2]]
    assert bool(weights.isnan().all())


@pytest.mark.parametrize("kind", ["spread", "one expert", "few pairs"])
def test_tiles_hold_every_pair_once_by_expert(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned_empty(monkeypatch)
    count = 2 if kind == "few pairs" else 2 * BLOCK_M + 3
    ids = torch.stack([torch.randperm(40)[:2].sort().values for _ in range(count)])
    if kind == "one expert":
        ids[:] = 7
    tiles = make_tiles(ids.to(torch.int32).to(DEVICE), 40)
    pairs = tiles.pairs.view(-1, BLOCK_M).tolist()
    assert len(pairs) == most_tiles(2 * count, 40)
    found = []
    owners = tiles.experts.tolist()
    used = [owner for owner in owners if owner >= 0]
    assert owners == sorted(used) + [-1] * (len(owners) - len(used))
    for owner, tile in zip(used, pairs, strict=False):
        real = [pair for pair in tile if pair != 2 * count]
        assert real == sorted(real)
        assert real
        assert all(ids.flatten()[pair] == owner for pair in real)
        found += real
    assert sorted(found) == list(range(2 * count))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_against_float64(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned_empty(monkeypatch)
    x = rows(9, dtype)
    out = moe_mlp(x, moe_params(dtype), silu_mul)
    want = naive.moe_mlp(x.double(), moe_params(dtype, wide=True), naive_silu_mul)
    assert out.dtype == dtype
    assert relative_error([out], [want]) < TOLERANCE[dtype]


def test_a_row_does_not_depend_on_the_others() -> None:
    params, x = moe_params(), rows(2 * BLOCK_M + 1)
    whole = moe_mlp(x, params, silu_mul)
    for first, last in ((0, 1), (5, 6), (32, 33), (3, 20)):
        assert torch.equal(moe_mlp(x[first:last], params, silu_mul), whole[first:last])


def test_the_host_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a number off a tensor is what would wait for a device."""

    def wait(*args: object) -> None:
        raise AssertionError("the host read a tensor")

    params, x = moe_params(), rows(3)
    for name in ("item", "tolist", "nonzero", "unique", "__bool__", "__int__", "__index__"):
        monkeypatch.setattr(Tensor, name, wait)
    out = moe_mlp(x, params, silu_mul)
    monkeypatch.undo()
    assert bool(out.isfinite().all())


def test_no_rows() -> None:
    assert moe_mlp(rows(0), moe_params(), silu_mul).shape == (0, WIDTH)


def test_one_expert_of_the_stack_is_a_view() -> None:
    packed = pack_experts(random(3, 8, 5, seed=1), random(3, 5, 4, seed=2), torch.float32)
    assert len(packed) == 3
    x = random(2, 5, seed=3)
    assert torch.equal(packed[1].gate_up(x), x @ packed.gate_up[1].T)


def test_what_has_no_kernel_is_refused() -> None:
    many = random(1100, 2, 3, seed=1), random(1100, 3, 1, seed=2)
    with pytest.raises(
        UnsupportedKernelError, match=r"moe_mlp .* 1100, .*experts E from 1 to 1024"
    ):
        pack_experts(*many, torch.float32)
    with pytest.raises(UnsupportedKernelError, match=r"moe_mlp .*torch\.float64"):
        moe_mlp(rows(1).double(), replace(moe_params(), top_k=1), silu_mul)
