"""Packed linears, norms, activations and experts: right, and the same bits at every batch size."""

from __future__ import annotations

import pytest
import torch

from kernels.linear import cpu as linear
from kernels.moe import cpu as moe_cpu
from kernels.moe import naive as moe_naive
from kernels.moe.naive import Expert, MoeParams, route
from kernels.rms_norm import cpu as norm_cpu
from kernels.rms_norm import naive as norm_naive
from kernels.silu_mul import cpu as silu_cpu
from kernels.silu_mul import naive as silu_naive


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_packed_linear_is_right_and_row_invariant(dtype: torch.dtype) -> None:
    weight = (random(96, 80) / 9).to(dtype)
    packed = linear.pack(weight, linear.fp16_rows_vary())
    assert packed.form == ("fp16" if dtype == torch.bfloat16 else "float32")
    assert packed.nbytes == weight.numel() * (2 if dtype == torch.bfloat16 else 4)
    rows = random(130, 80, seed=1)
    want = rows @ weight.float().T
    whole = packed(rows)
    torch.testing.assert_close(whole, want, atol=2e-5, rtol=1e-5)
    for count in range(1, 40):
        assert torch.equal(packed(rows[:count]), whole[:count])
        assert torch.equal(packed(rows[50 : 50 + count]), whole[50 : 50 + count])


def test_padding_keeps_the_rows() -> None:
    weight = (random(32, 32) / 6).bfloat16()
    padded, plain = linear.pack(weight, pad=True), linear.pack(weight, pad=False)
    rows = random(14, 32)
    for count in range(1, 15):
        torch.testing.assert_close(padded(rows[:count]), plain(rows[:count]))


def test_small_numbers_are_exact_after_scaling() -> None:
    weight = (random(32, 48) / 7).bfloat16()
    weight[3, 5] = 2.0**-25 * 1.2421875
    assert not linear.exact_in_fp16(weight.float())
    packed = linear.pack(weight, pad=False)
    assert packed.form == "fp16"
    rows = random(9, 48, seed=1)
    torch.testing.assert_close(packed(rows), rows @ weight.float().T, atol=2e-6, rtol=1e-5)
    # Rows of a unit matrix give the weight back, bit for bit.
    assert torch.equal(packed(torch.eye(48)), weight.float().T)


def test_numbers_that_fp16_cannot_hold_stay_float32() -> None:
    weight = torch.full((8, 8), 1e-30, dtype=torch.bfloat16)
    weight[0] = 1.0
    packed = linear.pack(weight, pad=False)
    assert packed.form == "float32"
    want = torch.full((3, 8), 8 * float(weight[1, 0]))
    want[:, 0] = 8.0
    torch.testing.assert_close(packed(torch.ones(3, 8)), want)


@pytest.mark.parametrize("width", [16, 50, 256])
@pytest.mark.parametrize("with_delta", [True, False])
def test_add_rms_norm(width: int, with_delta: bool) -> None:
    residual, delta = random(9, width), random(9, width, seed=1)
    other = residual.clone()
    scale = 1 + random(width, seed=2) * 0.1
    want = norm_naive.add_rms_norm(residual, delta if with_delta else None, scale, 1e-6)
    got = norm_cpu.add_rms_norm(other, delta if with_delta else None, scale, 1e-6)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)
    assert torch.equal(other, residual)


def test_join_norms() -> None:
    args = (random(5, 48), 1 + random(48, seed=1) * 0.1, random(5, 48, seed=2), random(48, seed=3))
    got, want = norm_cpu.join_norms(*args, 1e-6), norm_naive.join_norms(*args, 1e-6)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


def test_silu_mul() -> None:
    gate_up = torch.cat((random(7, 96) * 10, torch.tensor([[-200.0] * 48 + [200.0] * 48])))
    torch.testing.assert_close(
        silu_cpu.silu_mul(gate_up), silu_naive.silu_mul(gate_up), atol=1e-6, rtol=1e-5
    )


def moe_params() -> MoeParams:
    def expert(seed: int) -> Expert:
        up, down = random(32, 16, seed=seed) / 4, random(16, 16, seed=seed + 1) / 4
        return Expert(linear.pack(up, False), linear.pack(down, False))

    return MoeParams(
        router=linear.pack(random(8, 16, seed=50), False),
        experts=[expert(10 + 2 * i) for i in range(8)],
        shared=expert(40),
        shared_gate=linear.pack(random(1, 16, seed=51), False),
        top_k=3,
        renormalise=True,
    )


def test_moe_rows_do_not_depend_on_the_batch() -> None:
    params = moe_params()
    rows = random(77, 16, seed=60)
    whole = moe_cpu.moe_mlp(rows, params, silu_cpu.silu_mul)
    torch.testing.assert_close(
        whole, moe_naive.moe_mlp(rows, params, silu_naive.silu_mul), atol=1e-6, rtol=1e-5
    )
    for i in range(77):
        alone = moe_cpu.moe_mlp(rows[i : i + 1], params, silu_cpu.silu_mul)
        assert torch.equal(alone, whole[i : i + 1])


def test_route_weights_are_softmax_over_all_experts() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
    weights, chosen = route(logits, 2, renormalise=False)
    assert chosen.tolist() == [[1, 2]]
    torch.testing.assert_close(weights, torch.tensor([[0.64391426, 0.23688284]]))
    weights, _ = route(logits, 2, renormalise=True)
    torch.testing.assert_close(weights.sum(), torch.tensor(1.0))
