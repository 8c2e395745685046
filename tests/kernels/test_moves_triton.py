"""The Triton form of move_rows: bit for bit the naive one, and nothing else is touched."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.errors import UnsupportedKernelError
from kernels.moves import naive
from kernels.moves.triton import move_rows
from tests.kernels.poison import DEVICE


def tensors(dtype: torch.dtype, slots: int, *rows: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(slots)
    return [torch.randn(2, slots, *row, generator=generator).to(dtype).to(DEVICE) for row in rows]


def index(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [1, 2, 4, 5])
def test_within_the_same_tensors(count: int, dtype: torch.dtype) -> None:
    rows = [(3, 5), (2050,), (1,), (4, 4, 4), (7,)][:count]
    mine = tensors(dtype, 6, *rows)
    right = [t.clone() for t in mine]
    move_rows(mine, mine, index(5, 3), index(0, 1))
    naive.move_rows(right, right, index(5, 3), index(0, 1))
    assert all(torch.equal(a, b) for a, b in zip(mine, right, strict=True))


def test_between_pools_with_other_numbers_of_slots() -> None:
    sources, targets = (
        tensors(torch.float32, 6, (3, 5), (9,)),
        tensors(torch.float32, 3, (3, 5), (9,)),
    )
    right = [t.clone() for t in targets]
    move_rows(sources, targets, index(4, 1, 0), index(1, 0, 2))
    naive.move_rows(sources, right, index(4, 1, 0), index(1, 0, 2))
    assert all(torch.equal(a, b) for a, b in zip(targets, right, strict=True))


def test_the_first_rows_of_a_ring() -> None:
    ring, right = tensors(torch.float32, 4, (3, 10)) * 1, tensors(torch.float32, 4, (3, 10))
    mine, want = [ring[0][:, :, :2]], [right[0][:, :, :2]]
    move_rows(mine, mine, index(3), index(0))
    naive.move_rows(want, want, index(3), index(0))
    assert torch.equal(ring[0], right[0])


def test_nothing_to_move() -> None:
    mine = tensors(torch.float32, 3, (4,))
    right = mine[0].clone()
    move_rows(mine, mine, index(), index())
    move_rows([mine[0][:, :, :0]], [mine[0][:, :, :0]], index(1), index(0))
    assert torch.equal(mine[0], right)


def test_a_dtype_without_a_kernel_is_refused() -> None:
    mine = tensors(torch.float64, 3, (4,))
    with pytest.raises(UnsupportedKernelError, match=r"move_rows .*torch\.float64"):
        move_rows(mine, mine, index(1), index(0))
