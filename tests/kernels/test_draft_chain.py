"""A chain of re-fed drafts in one call against the same chain out of the operators' truths.

Where the CPU multiplies bfloat16, the form of all others runs in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from numba.core.codegen import get_host_cpu_features
from torch import Tensor

from kernels.draft_chain import cpu, naive
from kernels.draft_chain.products import BLOCK, exact_products, in_tiles, rounded_products
from kernels.draft_chain.tile import BFLOAT16
from kernels.draft_chain.types import ChainStart, ChainWeights
from tests.kernels.scenes import attention_params, kv_pages
from tests.processes import run_python

WIDTH, INNER, VOCAB, HEADS, KV_HEADS, DIM = 48, 80, 112, 4, 2, 32


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
        pages=kv_pages(36, KV_HEADS, DIM),
    )


def start_of(counts: list[int], depths: list[int], first_key: int) -> ChainStart:
    """Sequences of `counts` rows, the last of them near the end of a page."""
    last = [62, 130, 70, 61, 200, 127, 64, 65, 90][: len(counts)]
    rows = sum(counts)
    return ChainStart(
        tokens=np.arange(5, 5 + rows) % VOCAB,
        hidden=torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(2)),
        row_start=np.cumsum([0, *counts]),
        begins=np.array([end - n + 1 for n, end in zip(counts, last, strict=True)]),
        block_tables=np.arange(4 * len(counts)).reshape(len(counts), 4),
        first_key=np.full(len(counts), first_key),
        depths=np.array(depths),
    )


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("first_key", [0, 50])
@pytest.mark.parametrize(
    ("counts", "depths"),
    [
        ([1], [4]),
        ([1, 1], [3, 3]),
        ([3, 1, 2], [4, 4, 4]),
        ([1, 4, 2, 7], [2, 0, 4, 1]),
        ([1, 2, 3, 4, 1, 2, 1, 1, 9], [3, 3, 2, 3, 0, 3, 1, 3, 3]),
    ],
)
def test_cpu_equals_naive(
    counts: list[int], depths: list[int], first_key: int, threads: int
) -> None:
    truth, fast = weights(1), weights(1)
    start = start_of(counts, depths, first_key)
    before = (start.tokens.copy(), start.hidden.clone(), start.begins.copy())
    ids, logprobs = naive.draft_chain(truth, start)
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    try:
        got_ids, got_logprobs = cpu.draft_chain(fast)(start)
    finally:
        numba.set_num_threads(1)
    meant = np.arange(max(depths)) < np.array(depths)[:, None]
    assert np.array_equal(got_ids[meant], ids[meant])
    close = {"atol": 5 * cpu.TOLERANCE, "rtol": 10 * cpu.TOLERANCE}
    np.testing.assert_allclose(got_logprobs[meant], logprobs[meant], **close)
    torch.testing.assert_close(fast.pages.k, truth.pages.k, **close)
    torch.testing.assert_close(fast.pages.v, truth.pages.v, **close)
    assert np.array_equal(start.tokens, before[0]), "the start is the caller's"
    assert torch.equal(start.hidden, before[1])
    assert np.array_equal(start.begins, before[2])


FORMS = [
    (exact_products, 0.0),
    pytest.param(
        rounded_products,
        2.0**-8,
        marks=pytest.mark.skipif(not BFLOAT16, reason="this CPU has no AVX512_BF16"),
    ),
]


@pytest.mark.parametrize(("products", "rounding"), FORMS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize(("height", "width"), [(16, 2), (48, 34), (144, 256)])
def test_products(
    products: Callable[..., None], rounding: float, rows: int, height: int, width: int
) -> None:
    g = torch.Generator().manual_seed(3)
    matrix = torch.randn(height, width, generator=g).bfloat16()
    x = torch.randn(BLOCK, width, generator=g)
    out = torch.full((BLOCK, height), torch.nan)
    products(in_tiles(matrix).numpy(), x.numpy(), rows, out.numpy())
    exact = x.double() @ matrix.double().T
    most = x.double().abs() @ matrix.double().abs().T
    assert ((out - exact).abs() <= (rounding + 1e-6) * most)[:rows].all()
    if rounding:
        assert (out - exact)[:rows].abs().max() > 1e-4, "rounded to nothing coarser"
        nearest = x.bfloat16().double() @ matrix.double().T
        torch.testing.assert_close(out[:rows].double(), nearest[:rows], atol=1e-4, rtol=1e-5)


@pytest.mark.skipif(not BFLOAT16, reason="this CPU runs no other form anyway")
def test_the_form_of_other_cpus(tmp_path: Path) -> None:
    features: Any = get_host_cpu_features()
    others = ",".join(f for f in features.split(",") if "bf16" not in f)
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})
from kernels.draft_chain import cpu
from tests.kernels.test_draft_chain import test_cpu_equals_naive
test_cpu_equals_naive([3, 1, 2, 1, 1], [4, 4, 0, 2, 3], 50, 2)
print(cpu.TOLERANCE)
"""
    printed = run_python(code, tmp_path, seconds=120, NUMBA_CPU_FEATURES=others)
    assert float(printed) == 1e-5
