"""The most likely token and its log-probability, against torch."""

from __future__ import annotations

import pytest
import torch

from kernels.top1 import cpu, naive


@pytest.mark.parametrize(("rows", "width"), [(1, 2048), (7, 97), (128, 50), (2, 1)])
def test_cpu_equals_naive(rows: int, width: int) -> None:
    logits = torch.randn(rows, width, generator=torch.Generator().manual_seed(1)) * 5
    ids, logprobs = naive.top1(logits)
    got_ids, got_logprobs = cpu.top1(logits)
    assert torch.equal(got_ids, ids)
    torch.testing.assert_close(got_logprobs, logprobs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("top1", [naive.top1, cpu.top1])
def test_ties_go_to_the_lowest_id(top1: object) -> None:
    ids, logprobs = top1(torch.tensor([[0.0, 3.0, 3.0], [1.0, 1.0, 1.0]]))  # type: ignore[operator]
    assert ids.tolist() == [1, 0]
    assert logprobs[1].item() == pytest.approx(-1.0986123)
