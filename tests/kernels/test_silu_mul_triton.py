"""The Triton form of silu_mul: right on odd widths, in three dtypes, and typed refusals."""

from __future__ import annotations

import pytest
import torch

from kernels.cases import relative_error
from kernels.errors import UnsupportedKernelError
from kernels.silu_mul.naive import silu_mul as naive
from kernels.silu_mul.triton import silu_mul
from tests.kernels.poison import DEVICE, poisoned_empty

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 63), (2, 1500)])
def test_against_float64(
    rows: int, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned_empty(monkeypatch)
    generator = torch.Generator().manual_seed(1)
    gate_up = (torch.randn(rows, 2 * width, generator=generator) * 4).to(dtype).to(DEVICE)
    out = silu_mul(gate_up)
    assert out.dtype == dtype
    assert relative_error([out], [naive(gate_up.double())]) < TOLERANCE[dtype]


def test_large_gates_and_rows_of_a_wider_tensor() -> None:
    wide = torch.zeros(4, 12, device=DEVICE)
    wide[:, :2], wide[:, 4:6] = -200.0, 3.0
    wide[:, 2:4], wide[:, 6:8] = 200.0, 0.5
    out = silu_mul(wide[:, :8])
    assert torch.equal(out, torch.tensor([[0.0, 0.0, 100.0, 100.0]], device=DEVICE).expand(4, 4))


def test_no_rows() -> None:
    assert silu_mul(torch.empty(0, 8, device=DEVICE)).shape == (0, 4)


def test_a_dtype_without_a_kernel_is_refused() -> None:
    with pytest.raises(UnsupportedKernelError, match=r"silu_mul .* torch.float64.* 4, .*float32"):
        silu_mul(torch.zeros(1, 8, dtype=torch.float64, device=DEVICE))
