"""A chain of re-fed drafts in one call against the same chain out of the operators' truths.

Where the CPU multiplies bytes or bfloat16, the forms of others run in processes of their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from numba.core.codegen import get_host_cpu_features
from numpy.typing import NDArray
from torch import Tensor

from kernels.cases import relative_error
from kernels.cpu_features import BFLOAT16, BYTES
from kernels.draft_chain import cpu, naive
from kernels.draft_chain.form import tile_parts
from kernels.draft_chain.products import (
    BLOCK,
    EXACT,
    FORM,
    IN_BYTES,
    MANY,
    ROUNDED,
    Form,
    many_products,
    products,
    takes_many,
)
from kernels.draft_chain.types import ChainStart, ChainWeights
from kernels.tiles import LANES
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
    start = ChainStart(
        tokens=np.arange(5, 5 + rows) % VOCAB,
        # As a step leaves them: other rows lie between a sequence's and the next one's.
        hidden=torch.full((2 * rows + 3, WIDTH), 1e9),
        row_start=np.cumsum([0, *counts]),
        begins=np.array([end - n + 1 for n, end in zip(counts, last, strict=True)]),
        first_hidden=2 * np.cumsum([0, *counts])[:-1] + 1,
        block_tables=np.arange(4 * len(counts)).reshape(len(counts), 4),
        first_key=np.full(len(counts), first_key),
        depths=np.array(depths),
    )
    own = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(2))
    start.hidden[start.hidden_rows()] = own
    return start


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
    truth, fast, untouched = weights(1), weights(1), weights(1)
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
    found, right = (torch.from_numpy(each[meant]) for each in (got_logprobs, logprobs))
    # As in cases.py: sums of few terms round worse.
    assert relative_error([found], [right]) <= 2 * cpu.TOLERANCE
    for name in ("k", "v"):
        mine, its, was = (getattr(w.pages, name) for w in (fast, truth, untouched))
        written = its != was
        assert torch.equal(mine[~written], was[~written])
        assert relative_error([mine[written]], [its[written]]) <= 2 * cpu.TOLERANCE
    assert np.array_equal(start.tokens, before[0]), "the start is the caller's"
    assert torch.equal(start.hidden, before[1])
    assert np.array_equal(start.begins, before[2])


def in_words(form: Form, x: Tensor) -> NDArray[Any]:
    """Every row of x in a form."""
    words: NDArray[Any] = form.rows(*x.shape)
    for r in range(x.shape[0]):
        form.take(x.numpy(), r * x.shape[1], x.shape[1], words, r)
    return words


FORMS = [
    (EXACT, 0.0),
    pytest.param(
        ROUNDED,
        2.0**-8,
        marks=pytest.mark.skipif(not BFLOAT16, reason="this CPU has no AVX512_BF16"),
    ),
]


@pytest.mark.parametrize(("form", "rounding"), FORMS)
@pytest.mark.parametrize("rows", range(1, BLOCK + 1))
@pytest.mark.parametrize(("height", "width"), [(16, 2), (48, 34), (144, 256)])
def test_products(form: Form, rounding: float, rows: int, height: int, width: int) -> None:
    g = torch.Generator().manual_seed(3)
    matrix = torch.randn(height, width, generator=g).bfloat16()
    x = torch.randn(BLOCK, width, generator=g)
    out = torch.full((BLOCK, height), torch.nan)
    products(form.matrix(matrix).numpy(), in_words(form, x), rows, out.numpy())
    exact = x.double() @ matrix.double().T
    most = x.double().abs() @ matrix.double().abs().T
    assert ((out - exact).abs() <= (rounding + 1e-6) * most)[:rows].all()
    if rounding:
        assert (out - exact)[:rows].abs().max() > 1e-4, "rounded to nothing coarser"
        nearest = x.bfloat16().double() @ matrix.double().T
        torch.testing.assert_close(out[:rows].double(), nearest[:rows], atol=1e-4, rtol=1e-5)


@pytest.mark.skipif(not takes_many(64), reason="this machine multiplies no tiles of bytes")
@pytest.mark.parametrize("rows", [1, 4, 15, MANY])
@pytest.mark.parametrize(("height", "width"), [(16, 64), (48, 128), (144, 256), (80, 768)])
def test_many_products(rows: int, height: int, width: int) -> None:
    """What a few at a time are, but for the order in which two scales are multiplied."""
    g = torch.Generator().manual_seed(3)
    matrix = IN_BYTES.matrix(torch.randn(height, width, generator=g).bfloat16()).numpy()
    words = in_words(IN_BYTES, torch.randn(MANY, width, generator=g))
    out = np.full((MANY, height), np.nan, np.float32)
    many_products(matrix, words, rows, out)
    for first in range(0, rows, BLOCK):
        few = np.full((BLOCK, height), np.nan, np.float32)
        products(matrix, words[first : first + BLOCK], BLOCK, few)
        here = min(BLOCK, rows - first)
        np.testing.assert_allclose(out[first : first + here], few[:here], rtol=3e-7)


@pytest.mark.skipif(not takes_many(64), reason="this machine multiplies no tiles of bytes")
def test_a_wide_head_writes_many_rows_as_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of 70 and 37 rows; what is drafted behind them is the same too."""
    monkeypatch.setattr("tests.kernels.test_draft_chain.WIDTH", 64)
    found = []
    for height in (MANY, BLOCK):
        monkeypatch.setattr(cpu, "takes_many", lambda *widths, many=height == MANY: many)
        own = weights(1)
        ids, logprobs = cpu.draft_chain(own)(start_of([1, 64, 37], [3, 3, 2], 0))
        found.append((ids[:2], logprobs[:2], own.pages.k.numpy(), own.pages.v.numpy()))
    (many_ids, *many), (few_ids, *few) = found
    assert np.array_equal(many_ids, few_ids)
    for one, other in zip(many, few, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)
    assert not np.array_equal(many[1], weights(1).pages.k.numpy())


@pytest.mark.skipif(not BYTES, reason="this CPU has no AVX512_VNNI")
@pytest.mark.parametrize("rows", range(1, BLOCK + 1))
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(("height", "width"), [(16, 4), (48, 36), (144, 256), (16, 768)])
def test_byte_products(rows: int, large: bool, height: int, width: int) -> None:
    """To the last bit what integers say; `large`: every byte as large as it can be."""
    g = torch.Generator().manual_seed(3)
    matrix = torch.randn(height, width, generator=g).bfloat16()
    x = torch.randn(BLOCK, width, generator=g)
    if large:
        matrix, x = matrix.sign() * 3, x.sign() * x[:, :1]
        matrix[0], x[0] = 3, 2
    matrix[1] = 0
    whole, sizes = in_whole_numbers(matrix.float().numpy())
    bytes_of_x = in_words(IN_BYTES, x)
    numbers = np.ascontiguousarray(bytes_of_x[:, :-2]).view(np.int8).astype(np.int64)
    scales = np.ascontiguousarray(bytes_of_x[:, -1:]).view(np.float32)
    out = np.full((BLOCK, height), np.nan, np.float32)
    products(IN_BYTES.matrix(matrix).numpy(), bytes_of_x, rows, out)
    sums = (numbers @ whole.T).astype(np.float32)
    assert np.array_equal(out[:rows], (sums * sizes * scales)[:rows])
    assert np.abs(numbers).max(1).tolist() == [127] * BLOCK
    assert np.abs(numbers * scales - x.numpy()).max() <= 0.501 * scales.max()
    assert large or ((out[:rows, 1] == 0).all() and out[:rows, 0].all())


def in_whole_numbers(matrix: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """(rows in steps of a 127th of their largest, the steps)."""
    largest = np.abs(matrix).max(1).astype(np.float32)
    steps = np.where(largest > 0, largest, np.float32(1e-30)) / np.float32(127)
    return np.rint(matrix / steps[:, None]).astype(np.int64), steps


@pytest.mark.skipif(not BYTES, reason="this CPU has no AVX512_VNNI")
def test_rows_of_nothing_are_nothing() -> None:
    matrix = torch.randn(16, 8, generator=torch.Generator().manual_seed(4)).bfloat16()
    out = np.full((BLOCK, 16), np.nan, np.float32)
    nothing = in_words(IN_BYTES, torch.zeros(BLOCK, 8))
    products(IN_BYTES.matrix(matrix).numpy(), nothing, BLOCK, out)
    assert not out.any()


@pytest.mark.parametrize(("height", "width"), [(16, 4), (144, 256)])
def test_parts_are_the_bytes_of_a_copy(height: int, width: int) -> None:
    copied = FORM.matrix(torch.zeros(height, width, dtype=torch.bfloat16))
    assert sum(n * each for _, n, each in tile_parts(height, width)) == copied.nbytes


@pytest.mark.parametrize("at", [0, 1, 15, 16, 40, 47])
@pytest.mark.parametrize("shift", [-90.0, 0.0, 90.0])
def test_best(at: int, shift: float) -> None:
    logits = torch.randn(3 * LANES, generator=torch.Generator().manual_seed(5)) + shift
    logits[at] = logits[47] = shift + 9
    best, logprob = cpu._best(logits.numpy())
    assert best == at, "the first of equals"
    assert logprob == pytest.approx(float(logits.log_softmax(0)[at]), abs=1e-5)


def test_best_of_what_is_no_number() -> None:
    best, _ = cpu._best(np.full(32, np.nan, np.float32))
    assert 0 <= best < 32


@pytest.mark.skipif(not BFLOAT16, reason="this CPU runs no other form anyway")
@pytest.mark.parametrize(("without", "tolerance"), [("vnni", 1e-2), ("avx512", 1e-5)])
def test_the_form_of_other_cpus(without: str, tolerance: float, tmp_path: Path) -> None:
    features: Any = get_host_cpu_features()
    others = ",".join(f for f in features.split(",") if without not in f)
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})
from kernels.draft_chain import cpu
from tests.kernels.test_draft_chain import test_cpu_equals_naive
test_cpu_equals_naive([3, 1, 2, 1, 1], [4, 4, 0, 2, 3], 50, 2)
test_cpu_equals_naive([1, 2, 3, 4, 1, 2, 1, 1, 9], [3, 3, 2, 3, 0, 3, 1, 3, 3], 0, 1)
print(cpu.TOLERANCE)
"""
    printed = run_python(code, tmp_path, seconds=120, NUMBA_CPU_FEATURES=others)
    assert float(printed) == tolerance
