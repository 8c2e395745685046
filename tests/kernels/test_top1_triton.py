"""The Triton form of top1: right, ties to the lowest id, masked rows, NaN that stays seen."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels.errors import UnsupportedKernelError
from kernels.top1 import naive
from kernels.top1.triton import PIECE, top1
from tests.kernels.poison import DEVICE, poisoned_empty


def logits(rows: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(width)
    return (torch.randn(rows, width, generator=generator) * 5).to(dtype).to(DEVICE)


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 97), (2, PIECE), (2, 3 * PIECE + 1)])
def test_against_float64(rows: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned_empty(monkeypatch)
    x = logits(rows, width)
    ids, logprobs = top1(x)
    want_ids, want = naive.top1(x.double())
    assert ids.dtype == torch.int64
    assert logprobs.dtype == torch.float32
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(logprobs.double(), want, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits(dtype: torch.dtype) -> None:
    x = logits(3, 300, dtype)
    ids, logprobs = top1(x)
    best = x.max(-1).values
    for row in range(3):
        assert ids[row] == (x[row] == best[row]).nonzero()[0, 0]
    torch.testing.assert_close(logprobs.double(), naive.top1(x.double())[1], atol=1e-6, rtol=1e-5)


def test_ties_go_to_the_lowest_id_within_and_across_pieces() -> None:
    x = torch.zeros(3, 2 * PIECE + 7, device=DEVICE)
    x[0, [5, 9, PIECE + 1]] = 3.0
    x[1, [PIECE + 3, 2 * PIECE + 6]] = 3.0
    ids, logprobs = top1(x)
    assert ids.tolist() == [5, PIECE + 3, 0]
    assert logprobs[2].item() == pytest.approx(-math.log(2 * PIECE + 7), rel=1e-6)


def test_masked_pieces_and_rows() -> None:
    x = torch.full((2, 2 * PIECE), float("-inf"), device=DEVICE)
    x[0, PIECE + 4], x[0, PIECE + 9] = 1.0, 1.0
    ids, logprobs = top1(x)
    assert ids.tolist() == [PIECE + 4, 0]
    assert logprobs[0].item() == pytest.approx(-math.log(2), rel=1e-6)
    assert logprobs[1].item() == float("-inf")


def test_nan_gives_an_id_in_range_and_shows() -> None:
    x = torch.full((2, PIECE + 3), float("nan"), device=DEVICE)
    x[0, 1] = 2.0
    ids, logprobs = top1(x)
    assert bool(((ids >= 0) & (ids < PIECE + 3)).all())
    assert bool(logprobs.isnan().all())


def test_a_row_does_not_depend_on_the_others() -> None:
    x = logits(5, PIECE + 77)
    ids, logprobs = top1(x)
    for i in range(5):
        alone = top1(x[i : i + 1])
        assert torch.equal(alone[0], ids[i : i + 1])
        assert torch.equal(alone[1], logprobs[i : i + 1])


def test_no_rows_and_rows_of_a_wider_tensor() -> None:
    assert top1(torch.empty(0, 8, device=DEVICE))[0].shape == (0,)
    wide = torch.zeros(2, 20, device=DEVICE)
    wide[:, 3], wide[:, 12] = 1.0, 9.0
    assert top1(wide[:, :10])[0].tolist() == [3, 3]


def test_what_has_no_kernel_is_refused() -> None:
    with pytest.raises(UnsupportedKernelError, match=r"top1 .*torch\.float64.* 8, "):
        top1(torch.zeros(1, 8, dtype=torch.float64, device=DEVICE))
