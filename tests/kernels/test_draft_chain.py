"""A chain of re-fed drafts in one call against the same chain out of the operators' truths."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.draft_chain import cpu, naive
from kernels.draft_chain.types import ChainStart, ChainWeights
from tests.kernels.scenes import attention_params, kv_pages

WIDTH, INNER, VOCAB, HEADS, KV_HEADS, DIM = 48, 40, 97, 4, 2, 32


def weights(seed: int) -> ChainWeights:
    g = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, generator=g) / columns**0.5).bfloat16()

    def scale() -> Tensor:
        return 1 + torch.randn(WIDTH, generator=g) * 0.1

    return ChainWeights(
        embed=matrix(VOCAB, WIDTH),
        fc=matrix(WIDTH, 2 * WIDTH),
        qkv=matrix(2 * (HEADS + KV_HEADS) * DIM, WIDTH),
        o=matrix(WIDTH, HEADS * DIM),
        gate_up=matrix(2 * INNER, WIDTH),
        down=matrix(WIDTH, INNER),
        head=matrix(VOCAB, WIDTH) * 4,
        norm_embedding=scale(),
        norm_hidden=scale(),
        input_norm=scale(),
        post_norm=scale(),
        norm=scale(),
        attention=attention_params(HEADS, KV_HEADS, DIM),
        pages=kv_pages(12, KV_HEADS, DIM),
    )


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("first_key", [0, 50])
def test_cpu_equals_naive(rows: int, first_key: int) -> None:
    truth, fast = weights(1), weights(1)
    start = ChainStart(
        tokens=torch.arange(5, 5 + rows),
        hidden=torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(2)),
        positions=torch.tensor([62, 130, 70])[:rows],
        block_tables=torch.arange(4 * rows).view(rows, 4),
        first_key=torch.full((rows,), first_key),
    )
    before = (start.tokens.clone(), start.hidden.clone(), start.positions.clone())
    ids, logprobs = naive.draft_chain(truth, start, 4)
    got_ids, got_logprobs = cpu.draft_chain(fast, start, 4)
    assert torch.equal(got_ids, ids)
    torch.testing.assert_close(got_logprobs, logprobs, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(fast.pages.k, truth.pages.k, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(fast.pages.v, truth.pages.v, atol=1e-5, rtol=1e-4)
    for tensor, was in zip((start.tokens, start.hidden, start.positions), before, strict=True):
        assert torch.equal(tensor, was), "the start is the caller's"
