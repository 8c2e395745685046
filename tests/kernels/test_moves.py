"""The CPU form of move_rows: bit for bit the naive one, and nothing else is touched."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.moves import cpu, naive


def tensors(dtype: torch.dtype, slots: int, *rows: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(slots)
    return [torch.randn(2, slots, *row, generator=generator).to(dtype) for row in rows]


def index(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_within_the_same_tensors(dtype: torch.dtype) -> None:
    mine = tensors(dtype, 6, (3, 5), (7,), (4, 4, 4))
    right = [t.clone() for t in mine]
    cpu.move_rows(mine, mine, index(5, 3), index(0, 1))
    naive.move_rows(right, right, index(5, 3), index(0, 1))
    assert all(torch.equal(a, b) for a, b in zip(mine, right, strict=True))
    assert not torch.equal(mine[0], tensors(dtype, 6, (3, 5))[0])


def test_between_pools_with_other_numbers_of_slots() -> None:
    sources = tensors(torch.float32, 6, (3, 5), (9,))
    targets = tensors(torch.float32, 3, (3, 5), (9,))
    right = [t.clone() for t in targets]
    cpu.move_rows(sources, targets, index(4, 1), index(1, 0))
    naive.move_rows(sources, right, index(4, 1), index(1, 0))
    assert all(torch.equal(a, b) for a, b in zip(targets, right, strict=True))


def test_the_first_rows_of_a_ring() -> None:
    ring, right = tensors(torch.float32, 4, (3, 10))[0], tensors(torch.float32, 4, (3, 10))[0]
    mine, want = [ring[:, :, :2]], [right[:, :, :2]]
    cpu.move_rows(mine, mine, index(3), index(0))
    naive.move_rows(want, want, index(3), index(0))
    assert torch.equal(ring, right)
