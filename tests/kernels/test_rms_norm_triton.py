"""The Triton norms: right on odd widths, in place, the same bits at any number of rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.cases import relative_error
from kernels.errors import UnsupportedKernelError
from kernels.rms_norm import naive
from kernels.rms_norm.triton import add_rms_norm, join_norms, rms_norm
from tests.kernels.poison import DEVICE, poisoned_empty

EPS = 1e-6
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def rows(count: int, width: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=generator).to(dtype).to(DEVICE)


def scale(width: int, seed: int) -> Tensor:
    return 1 + 0.1 * rows(1, width, torch.float32, seed)[0]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("count", "width"), [(1, 1), (3, 63), (2, 5120)])
@pytest.mark.parametrize("with_delta", [True, False])
def test_add_rms_norm(
    count: int,
    width: int,
    with_delta: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    poisoned_empty(monkeypatch)
    residual, weight = rows(count, width, dtype, 1), scale(width, 3)
    delta = rows(count, width, dtype, 2) if with_delta else None
    wide, other = residual.double(), None if delta is None else delta.double()
    before = residual.clone()
    out = add_rms_norm(residual, delta, weight, EPS)
    want = naive.add_rms_norm(wide, other, weight.double(), EPS)
    assert out.dtype == dtype
    assert relative_error([out, residual], [want, wide]) < TOLERANCE[dtype]
    # The sum is rounded as torch rounds it; the interpreter cuts bfloat16 off instead.
    want_sum = before if delta is None else before + delta
    if dtype is torch.bfloat16 and DEVICE.type == "cpu":
        torch.testing.assert_close(residual, want_sum, atol=0, rtol=2**-7)
    else:
        assert torch.equal(residual, want_sum)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_join_norms(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned_empty(monkeypatch)
    left, right = rows(3, 77, dtype, 1), rows(3, 77, dtype, 2)
    out = join_norms(left, scale(77, 3), right, scale(77, 4), EPS)
    want = naive.join_norms(
        left.double(), scale(77, 3).double(), right.double(), scale(77, 4).double(), EPS
    )
    assert out.dtype == dtype
    assert relative_error([out], [want]) < TOLERANCE[dtype]


def test_rms_norm_keeps_the_shape() -> None:
    x = rows(6, 32, torch.float32, 1).view(2, 3, 32)
    want = naive.rms_norm(x.double(), scale(32, 2).double(), EPS)
    assert relative_error([rms_norm(x, scale(32, 2), EPS)], [want]) < 1e-5


def test_rows_of_a_wider_tensor() -> None:
    wide = rows(4, 96, torch.float32, 1)
    residual, delta = wide[:, :40], rows(4, 60, torch.float32, 2)[:, 20:]
    rest = wide[:, 40:].clone()
    want = residual + delta
    out = add_rms_norm(residual, delta, scale(40, 3), EPS)
    assert torch.equal(wide[:, :40], want)
    assert torch.equal(wide[:, 40:], rest)
    assert relative_error([out], [naive.rms_norm(want, scale(40, 3), EPS)]) < 1e-5


def test_a_row_does_not_depend_on_the_others() -> None:
    x, delta = rows(9, 200, torch.bfloat16, 1), rows(9, 200, torch.bfloat16, 2)
    whole = add_rms_norm(x.clone(), delta, scale(200, 3), EPS)
    for i in range(9):
        alone = add_rms_norm(x[i : i + 1].clone(), delta[i : i + 1], scale(200, 3), EPS)
        assert torch.equal(alone, whole[i : i + 1])


def test_zeros_and_no_rows() -> None:
    zero = torch.zeros(2, 8, device=DEVICE)
    assert torch.equal(add_rms_norm(zero, None, scale(8, 1), EPS), zero)
    assert add_rms_norm(zero[:0], None, scale(8, 1), EPS).shape == (0, 8)
    assert join_norms(zero[:0], scale(8, 1), zero[:0], scale(8, 1), EPS).shape == (0, 16)


def test_what_has_no_kernel_is_refused() -> None:
    x = torch.zeros(1, 8, dtype=torch.float64, device=DEVICE)
    with pytest.raises(
        UnsupportedKernelError, match=r"add_rms_norm .*torch\.float64.* 8, .*cpu|cuda"
    ):
        add_rms_norm(x, None, scale(8, 1), EPS)
    wide = torch.zeros(1, 40000, device=DEVICE)
    with pytest.raises(UnsupportedKernelError, match=r"join_norms .* 40000, .*1 to 32768"):
        join_norms(wide, wide[0], wide, wide[0], EPS)
