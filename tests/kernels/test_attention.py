"""The numba form of the attention mixer against the truth, and its exactness across batches."""

from __future__ import annotations

import pytest
import torch

from kernels.attention import cpu, naive
from kernels.attention.types import KvPages
from tests.kernels.scenes import Rows, attention_params, kv_pages, make_batch


def qkv_rows(heads: int, kv_heads: int, width: int, rows: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(5)
    return torch.randn(rows, (2 * heads + 2 * kv_heads) * width, generator=g)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width"), [(4, 2, 64), (2, 2, 32), (3, 1, 16), (3, 1, 84)]
)
@pytest.mark.parametrize(
    "rows",
    [
        [Rows(0, 0, 1)],
        [Rows(0, 63, 1), Rows(1, 64, 1), Rows(2, 0, 65)],
        [Rows(2, 200, 4), Rows(0, 0, 3), Rows(1, 60, 70)],
        [Rows(2, 200, 4, first_key=190), Rows(0, 70, 3, first_key=64), Rows(1, 9, 2)],
    ],
)
def test_cpu_equals_naive(heads: int, kv_heads: int, width: int, rows: list[Rows]) -> None:
    params = attention_params(heads, kv_heads, width)
    truth, pages = kv_pages(16, kv_heads, width), kv_pages(16, kv_heads, width)
    batch = make_batch(rows)
    qkv = qkv_rows(heads, kv_heads, width, int(batch.row_start[-1]))
    want = naive.attention_mixer(qkv, params, truth, batch)
    got = cpu.attention_mixer(qkv, params, pages, batch)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(pages.k, truth.k, atol=1e-6, rtol=1e-5)
    assert torch.equal(pages.v, truth.v)


def test_any_split_and_any_neighbour_give_the_same_bits() -> None:
    params = attention_params(4, 2, 64)
    qkv = qkv_rows(4, 2, 64, 150)
    whole = kv_pages(16, 2, 64)
    want = cpu.attention_mixer(qkv, params, whole, make_batch([Rows(1, 0, 150)]))
    parts = kv_pages(16, 2, 64)
    noise = qkv_rows(4, 2, 64, 90)
    start = 0
    for count in (1, 7, 64, 1, 77):
        batch = make_batch([Rows(0, 30, 3), Rows(1, start, count), Rows(2, 0, 5)])
        mixed = torch.cat((noise[:3], qkv[start : start + count], noise[3:8]))
        got = cpu.attention_mixer(mixed, params, parts, batch)[3 : 3 + count]
        assert torch.equal(got, want[start : start + count])
        start += count


@pytest.mark.parametrize("mixer", [naive.attention_mixer, cpu.attention_mixer])
def test_what_lies_behind_the_last_token_is_never_read(mixer: object) -> None:
    params = attention_params(2, 1, 32)
    qkv = qkv_rows(2, 1, 32, 70)
    clean, dirty = kv_pages(8, 1, 32), kv_pages(8, 1, 32)
    poisoned = KvPages(dirty.k.fill_(torch.nan), dirty.v.fill_(torch.nan))
    batch = make_batch([Rows(0, 0, 70)])
    want = mixer(qkv, params, clean, batch)  # type: ignore[operator]
    got = mixer(qkv, params, poisoned, batch)  # type: ignore[operator]
    assert torch.equal(got, want)


@pytest.mark.parametrize("first", [0, 60])
def test_a_row_that_is_no_number_leaves_those_before_it_alone(first: int) -> None:
    """They read pages together, and its key and value lie in them."""
    params = attention_params(4, 2, 64)
    qkv = qkv_rows(4, 2, 64, 20)
    batch = make_batch([Rows(0, first, 20)])
    want = cpu.attention_mixer(qkv, params, kv_pages(8, 2, 64), batch)
    qkv[13] = torch.nan
    got = cpu.attention_mixer(qkv, params, kv_pages(8, 2, 64), batch)
    assert torch.equal(got[:13], want[:13])
    assert got[13:].isnan().all()


def test_the_bits_do_not_depend_on_how_many_rows_read_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With one thread eight rows do, with more than there are rows each alone."""
    params, qkv = attention_params(4, 1, 48), qkv_rows(4, 1, 48, 6)
    batch = make_batch([Rows(0, 61, 6)])
    found = []
    for threads in (1, 2, 3, 99):
        monkeypatch.setattr("numba.get_num_threads", lambda count=threads: count)
        found.append(cpu.attention_mixer(qkv, params, kv_pages(8, 1, 48), batch))
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("start", [5000, 33000])
def test_far_behind_in_a_sequence_few_rows_read_together(start: int) -> None:
    """Three in one case, each alone in the other; the scores of more would not stay in the L2."""
    params = attention_params(4, 1, 16, length=start + 8)
    blocks = start // 64 + 1
    qkv = qkv_rows(4, 1, 16, 8)
    pages = [kv_pages(blocks + 1, 1, 16) for _ in range(3)]
    batch = make_batch([Rows(0, start, 8)], blocks)
    got = cpu.attention_mixer(qkv, params, pages[0], batch)
    alone = [
        cpu.attention_mixer(
            qkv[row : row + 1], params, pages[1], make_batch([Rows(0, start + row, 1)], blocks)
        )
        for row in range(8)
    ]
    assert torch.equal(torch.cat(alone), got)
    want = naive.attention_mixer(qkv, params, pages[2], batch)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-3)
