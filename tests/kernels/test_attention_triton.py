"""The Triton form of the attention mixer: against a float64 truth, and exact across steps."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention import naive, triton_decode
from kernels.attention.triton import attention_mixer
from kernels.attention.triton_decode import (
    EQUAL,
    MOST_SPLITS,
    PER_OCTAVE,
    first_key_of,
    split_count,
)
from kernels.attention.types import AttentionParams, KvPages
from kernels.batch import RaggedBatch
from kernels.cases import relative_error
from kernels.errors import UnsupportedKernelError
from tests.kernels.poison import DEVICE, poisoned_empty
from tests.kernels.scenes import PAGE, Rows, attention_params, kv_pages, make_batch

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
BLOCKS = 8
LENGTH = BLOCKS * PAGE
# nH, nKV, hd
SMALL = (4, 2, 32)


@triton.jit
def split_starts(
    p_out: tl.tensor,
    SIZE: tl.constexpr,
    EQUAL: tl.constexpr,
    PER_OCTAVE: tl.constexpr,
    MOST: tl.constexpr,
) -> None:
    o_split = tl.arange(0, MOST)
    tl.store(p_out + o_split, first_key_of(o_split, SIZE, EQUAL, PER_OCTAVE))


def placed(x: Any) -> Any:
    """A dataclass with its tensors on the device of the tests."""
    tensors = {f.name: getattr(x, f.name) for f in fields(x)}
    return replace(x, **{n: t.to(DEVICE) for n, t in tensors.items() if isinstance(t, Tensor)})


def setting(shape: tuple[int, int, int]) -> AttentionParams:
    return placed(attention_params(*shape, length=LENGTH))


def step(rows: list[Rows]) -> RaggedBatch:
    return placed(make_batch(rows, BLOCKS))


def memory(shape: tuple[int, int, int], dtype: torch.dtype, slots: int = 7) -> KvPages:
    """Pages of `slots` sequences and the dummy block, full of what an earlier tenant left."""
    pages = kv_pages(slots * BLOCKS + 1, *shape[1:])
    return placed(KvPages(pages.k.to(dtype), pages.v.to(dtype)))


def inputs(shape: tuple[int, int, int], rows: int, dtype: torch.dtype, seed: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    columns = 2 * (shape[0] + shape[1]) * shape[2]
    return torch.randn(rows, columns, generator=generator).to(dtype).to(DEVICE)


def copied(pages: KvPages) -> KvPages:
    return KvPages(pages.k.clone(), pages.v.clone())


def error(
    shape: tuple[int, int, int],
    rows: list[Rows],
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
) -> float:
    """The worst error of result and pages; a single row, so that none hides, may have twice that.

    The interpreter cuts bfloat16 off where a card rounds it (triton 3.9): twice the error there.
    """
    params, batch = setting(shape), step(rows)
    pages = memory(shape, kv_dtype or dtype)
    qkv = inputs(shape, int(batch.row_start[-1]), dtype)
    exact = KvPages(pages.k.double(), pages.v.double())
    want = naive.attention_mixer(qkv.double(), params, exact, batch)
    out = attention_mixer(qkv, params, pages, batch)
    assert out.dtype == dtype
    worst = max(relative_error([mine], [right]) for mine, right in zip(out, want, strict=True))
    return max(worst / 2, relative_error([out, pages.k, pages.v], [want, exact.k, exact.v]))


KEYS = [Rows(slot, keys - 1, 1) for slot, keys in enumerate((1, 2, 3, 63, 64, 65, 500))]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_decode_at_any_length(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned_empty(monkeypatch)
    assert error(SMALL, KEYS, dtype) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    "shape",
    [(1, 1, 16), (3, 1, 64), (4, 4, 16), (6, 2, 128), (16, 1, 32), (2, 1, 256), (12, 3, 16)],
)
def test_group_sizes_and_head_sizes(
    shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned_empty(monkeypatch)
    rows = [Rows(0, 130, 2), Rows(1, 0, 3, chunked=True)]
    assert error(shape, rows) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float16),
        (torch.float16, torch.bfloat16),
    ],
)
def test_pages_of_another_dtype(
    dtype: torch.dtype, kv_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned_empty(monkeypatch)
    rows = [Rows(0, 130, 2), Rows(1, 3, 3, chunked=True)]
    assert error(SMALL, rows, dtype, kv_dtype) < max(TOLERANCE[dtype], TOLERANCE[kv_dtype])


@pytest.mark.parametrize("size", [128, 256])
def test_splits_cover_every_key_once(size: int) -> None:
    """Sixteen of one size, then eight in each octave of positions."""
    sizes = [size] * 16 + [2 * size << octave for octave in range(7) for _ in range(8)]
    edges = [sum(sizes[:n]) for n in range(len(sizes) + 1)]
    for count in range(1, len(sizes) + 1):
        assert split_count(edges[count], size) == count
        assert split_count(edges[count - 1] + 1, size) == count
    assert split_count(262144, 256) == 64
    starts = torch.full((128,), -1, dtype=torch.int32, device=DEVICE)
    split_starts[(1,)](starts, size, EQUAL, PER_OCTAVE, MOST_SPLITS)
    assert starts.tolist()[: len(edges)] == edges


def test_long_sequences_have_longer_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind 2048 keys: rows on both sides of an edge, alone and together; a late first key."""
    poisoned_empty(monkeypatch)
    shape, blocks = (1, 1, 16), 50
    params = placed(attention_params(*shape, length=blocks * PAGE))
    pages = placed(kv_pages(2 * blocks + 1, 1, 16))
    rows = [Rows(0, 2303, 2), Rows(1, 3100, 1, first_key=2500)]
    batch = placed(make_batch(rows, blocks))
    qkv, exact, alone = inputs(shape, 3, torch.float32), copied(pages), copied(pages)
    doubles = KvPages(pages.k.double(), pages.v.double())
    want = naive.attention_mixer(qkv.double(), params, doubles, batch)
    got = attention_mixer(qkv, params, exact, batch)
    assert relative_error(list(got), list(want)) < TOLERANCE[torch.float32]
    single = placed(make_batch([Rows(0, 2303, 1)], blocks))
    assert torch.equal(attention_mixer(qkv[:1], params, alone, single), got[:1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "rows",
    [
        [Rows(0, 125, 5), Rows(1, 0, 4), Rows(2, 254, 3)],
        [Rows(0, 200, 4, first_key=190), Rows(1, 70, 3, first_key=64), Rows(2, 300, 1)],
        [Rows(0, 300, 2, first_key=140), Rows(1, 128, 1, first_key=128)],
    ],
    ids=["across splits", "first key", "empty splits"],
)
def test_verify(rows: list[Rows], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned_empty(monkeypatch)
    assert error(SMALL, rows, dtype) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "rows",
    [
        [Rows(0, 0, 65, chunked=True)],
        [Rows(0, 64, 3, chunked=True), Rows(1, 448, 2, chunked=True), Rows(2, 0, 1, chunked=True)],
        [
            Rows(0, 99, 2),
            Rows(1, 128, 70, chunked=True),
            Rows(2, 0, 1),
            Rows(3, 2, 1, chunked=True),
        ],
    ],
    ids=["whole prompt", "on cached context", "beside decode"],
)
def test_prefill(rows: list[Rows], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned_empty(monkeypatch)
    assert error(SMALL, rows, dtype) < TOLERANCE[dtype]


def test_one_page_of_odd_size() -> None:
    """Pages of 48 tokens: tiles of 16, the largest power of two in them."""
    params, batch = setting(SMALL), step([Rows(0, 100, 3), Rows(1, 0, 50, chunked=True)])
    generator = torch.Generator().manual_seed(6)
    k = torch.randn(17, 2, 32, 48, generator=generator).to(DEVICE)
    v = torch.randn(17, 2, 48, 32, generator=generator).to(DEVICE)
    pages, truth = KvPages(k, v), KvPages(k.double(), v.double())
    qkv = inputs(SMALL, 53, torch.float32)
    want = naive.attention_mixer(qkv.double(), params, truth, batch)
    out = attention_mixer(qkv, params, pages, batch)
    assert relative_error([out, pages.k, pages.v], [want, truth.k, truth.v]) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [SMALL, (6, 1, 16)])
def test_a_verify_has_the_bits_of_single_rows(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """7 rows: more than one tile of lines, over the edge of a split."""
    params, qkv = setting(shape), inputs(shape, 7, dtype)
    at_once, one_by_one = memory(shape, dtype, 1), memory(shape, dtype, 1)
    want = attention_mixer(qkv, params, at_once, step([Rows(0, 124, 7)]))
    for i in range(7):
        got = attention_mixer(qkv[i : i + 1], params, one_by_one, step([Rows(0, 124 + i, 1)]))
        assert torch.equal(got[0], want[i])
    assert torch.equal(at_once.k, one_by_one.k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_alone_or_among_others_the_bits_are_the_same(dtype: torch.dtype) -> None:
    """Beside decode rows, other verifies and prompts; that neighbours are prompts too."""
    params, qkv = setting(SMALL), inputs(SMALL, 16, dtype)
    pages = memory(SMALL, dtype)
    rows = [Rows(2, 140, 2)]
    want = attention_mixer(qkv[3:5], params, copied(pages), step(rows))
    among = [Rows(0, 30, 3), *rows, Rows(1, 0, 1), Rows(4, 300, 1), Rows(3, 65, 1)]
    got = attention_mixer(qkv[:8], params, copied(pages), step(among))
    assert torch.equal(got[3:5], want)
    mixed = [Rows(0, 30, 3, chunked=True), *rows, Rows(1, 0, 8, chunked=True), Rows(3, 65, 1)]
    got = attention_mixer(qkv[:14], params, copied(pages), step(mixed))
    assert torch.equal(got[3:5], want)


def test_padding_changes_no_bit_and_writes_the_dummy_block_only() -> None:
    params, qkv = setting(SMALL), inputs(SMALL, 6, torch.float32)
    pages = memory(SMALL, torch.float32, 2)
    dummy = pages.k.shape[0] - 1
    plain = step([Rows(0, 140, 2), Rows(1, 65, 1)])
    exact = copied(pages)
    want = attention_mixer(qkv[:3], params, exact, plain)
    padded = step([Rows(0, 140, 2), Rows(1, 65, 1), Rows(0, 0, 1), Rows(0, 0, 2)])
    tables = torch.full((4, BLOCKS + 6), dummy, device=DEVICE)
    tables[:2, :BLOCKS] = plain.block_tables
    got = attention_mixer(qkv, params, pages, replace(padded, block_tables=tables))
    assert torch.equal(got[:3], want)
    assert torch.equal(pages.k[:dummy], exact.k[:dummy])
    assert torch.equal(pages.v[:dummy], exact.v[:dummy])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_cut_of_a_prompt_gives_the_same_bits(dtype: torch.dtype) -> None:
    params, qkv = setting(SMALL), inputs(SMALL, 130, dtype)
    whole, parts = memory(SMALL, dtype, 2), memory(SMALL, dtype, 2)
    want = attention_mixer(qkv, params, whole, step([Rows(1, 0, 130, chunked=True)]))
    start = 0
    for count in (1, 63, 7, 59):
        batch = step([Rows(0, 20, 1), Rows(1, start, count, chunked=True)])
        mixed = torch.cat((qkv[:1], qkv[start : start + count]))
        got = attention_mixer(mixed, params, parts, batch)
        assert torch.equal(got[1:], want[start : start + count])
        start += count


@pytest.mark.parametrize(
    "rows",
    [
        [Rows(0, 140, 3), Rows(1, 0, 4), Rows(2, 65, 1)],
        [Rows(0, 140, 3), Rows(1, 0, 4, chunked=True), Rows(2, 65, 1)],
    ],
)
def test_wanted_rows_only(rows: list[Rows], monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned_empty(monkeypatch)
    params, batch = setting(SMALL), step(rows)
    qkv, pages = inputs(SMALL, 8, torch.float32), memory(SMALL, torch.float32)
    full, few, none = copied(pages), copied(pages), copied(pages)
    want = attention_mixer(qkv, params, full, batch)
    wanted = torch.tensor([0, 2, 5, 6], device=DEVICE)
    assert torch.equal(attention_mixer(qkv, params, few, batch, wanted), want[wanted])
    nothing = attention_mixer(qkv, params, none, batch, wanted[:0])
    assert nothing.shape == (0, want.shape[1])
    for pages in (few, none):
        assert torch.equal(pages.k, full.k)
        assert torch.equal(pages.v, full.v)


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("chunked", [True, False])
def test_rows_in_turns_when_the_scratch_is_small(
    chunked: bool, counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned_empty(monkeypatch)
    params = setting(SMALL)
    batch = step([Rows(0, 140, 3), Rows(1, 0, 3, chunked=chunked), Rows(2, 65, 2), Rows(3, 9, 1)])
    qkv, pages = inputs(SMALL, 9, torch.float32), memory(SMALL, torch.float32)
    want = attention_mixer(qkv, params, copied(pages), batch)
    assert not want.isnan().any()
    # Two rows of 4 heads and 4 splits at a time.
    monkeypatch.setattr(triton_decode, "SCRATCH_BYTES", 2 * 4 * 4 * 34 * 4)
    batch = batch if counted else replace(batch, recurrent_rows=None)
    assert torch.equal(attention_mixer(qkv, params, copied(pages), batch), want)


@pytest.mark.parametrize("chunked", [True, False])
def test_what_lies_outside_what_a_row_sees_is_never_used(chunked: bool) -> None:
    params, qkv = setting(SMALL), inputs(SMALL, 3, torch.float32)
    clean, dirty = memory(SMALL, torch.float32, 1), memory(SMALL, torch.float32, 1)
    for tensor, tokens in ((dirty.k, 3), (dirty.v, 2)):
        tensor[:2].narrow(tokens, 0, 64)[1].narrow(tokens - 1, 10, 54).fill_(torch.nan)
        tensor[2:] = torch.nan
        tensor[0].narrow(tokens - 1, 0, 5).fill_(torch.nan)
    batch = step([Rows(0, 71, 3, first_key=5, chunked=chunked)])
    want = attention_mixer(qkv, params, clean, batch)
    assert torch.equal(attention_mixer(qkv, params, dirty, batch), want)


def test_rows_of_a_wider_tensor_and_no_rows() -> None:
    params, batch = setting(SMALL), step([Rows(0, 70, 2)])
    qkv, pages = inputs(SMALL, 2, torch.float32), memory(SMALL, torch.float32, 1)
    wide = torch.cat((qkv, qkv), 1)[:, : qkv.shape[1]]
    want = attention_mixer(qkv, params, copied(pages), batch)
    assert torch.equal(attention_mixer(wide, params, copied(pages), batch), want)
    empty = replace(batch, positions=batch.positions[:0], row_segment=batch.row_segment[:0])
    assert attention_mixer(qkv[:0], params, pages, empty).shape == (0, want.shape[1])


def test_what_has_no_kernel_is_refused() -> None:
    params, batch = setting(SMALL), step([Rows(0, 0, 1)])
    qkv, pages = inputs(SMALL, 1, torch.float32), memory(SMALL, torch.float32, 1)
    names = r"attention_mixer .* torch.float64.* 32, device (cpu|cuda).*float32, bfloat16 and"
    with pytest.raises(UnsupportedKernelError, match=names):
        attention_mixer(qkv.double(), params, pages, batch)
    with pytest.raises(UnsupportedKernelError, match=r"torch\.float64"):
        attention_mixer(qkv, params, KvPages(pages.k.double(), pages.v), batch)
    with pytest.raises(UnsupportedKernelError, match=r"head size 24.*16, 32, 64, 128 and 256"):
        attention_mixer(qkv, replace(params, head_dim=24), pages, batch)
    with pytest.raises(UnsupportedKernelError, match=r"pages of 8 tokens.*multiple of 16 tokens"):
        attention_mixer(qkv, params, KvPages(pages.k[..., :8], pages.v[:, :, :8]), batch)
