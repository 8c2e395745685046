"""The fixed-tile product: right on odd sizes, and a row's bits never depend on the other rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.cases import relative_error
from kernels.errors import UnsupportedKernelError
from kernels.linear.triton import linear, pack
from tests.kernels.poison import DEVICE, poisoned_empty

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"), [(1, 1, 1), (3, 31, 63), (64, 64, 64), (65, 100, 130)]
)
def test_against_float64(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned_empty(monkeypatch)
    x, weight = random(rows, inputs, dtype=dtype), random(outputs, inputs, dtype=dtype, seed=1)
    out = linear(x, weight)
    assert out.dtype == dtype
    assert relative_error([out], [x.double() @ weight.double().T]) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    packed = pack(random(70, 90, dtype=dtype) / 9, dtype)
    x = random(129, 90, dtype=dtype, seed=1)
    whole = packed(x)
    for count in (1, 2, 3, 8, 16, 33, 64, 65, 128):
        assert torch.equal(packed(x[:count]), whole[:count])
    for place in (1, 63, 64, 100, 128):
        assert torch.equal(packed(x[place : place + 1]), whole[place : place + 1])


def test_a_packed_weight_says_what_it_is() -> None:
    packed = pack(random(8, 6, dtype=torch.bfloat16), torch.float32)
    assert packed.form == "triton"
    assert packed.weight.dtype == torch.float32
    assert packed.nbytes == 8 * 6 * 4


def test_rows_of_a_wider_tensor_and_no_rows() -> None:
    wide, weight = random(4, 20), random(5, 12, seed=1)
    x = wide[:, 8:]
    assert relative_error([linear(x, weight)], [x.double() @ weight.double().T]) < 1e-5
    assert linear(x[:0], weight).shape == (0, 5)


def test_what_has_no_kernel_is_refused() -> None:
    weight = random(4, 8).double()
    with pytest.raises(UnsupportedKernelError, match=r"linear .*torch\.float64.* 8, "):
        pack(weight, torch.float64)
    with pytest.raises(UnsupportedKernelError, match=r"linear .*torch\.float64"):
        linear(random(1, 8).double(), weight)
