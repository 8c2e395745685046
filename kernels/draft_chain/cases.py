"""Cases of the chain of drafts, on the host: a card has no such kernel and runs pass after pass.

Where numba is missing, or the device is a card, they hold the truth's own float32 to float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from kernels.attention.types import AttentionParams, KvPages
from kernels.cases import Case, CaseSize
from kernels.draft_chain import naive
from kernels.draft_chain.types import Chain, ChainStart, ChainWeights

PAGE = 64
# Width, inner width, vocabulary, heads, KV heads, head size; then rows and depths of sequences.
SMOKE = [((48, 80, 112, 4, 2, 32), [1], [3]), ((32, 16, 48, 2, 1, 16), [1, 3], [2, 1])]
# spark-tiny's own head is the largest that the chain is meant for.
CARD = [((256, 768, 2048, 4, 2, 64), [1], [3]), ((256, 768, 2048, 4, 2, 64), [1, 2, 1, 4], [3] * 4)]


def cases(size: CaseSize, device: torch.device) -> list[Case]:
    """float32 rows over bfloat16 matrices."""
    shapes = CARD if size is CaseSize.CARD else SMOKE
    return [_case(sizes, counts, depths, device) for sizes, counts, depths in shapes]


def _form(device: torch.device) -> tuple[str, Callable[[ChainWeights], Chain], float, int]:
    """(name, how a chain is made, tolerance, bytes of a number in a matrix)."""
    if device.type != "cpu" or find_spec("numba") is None:
        return "naive", partial(partial, naive.draft_chain), 1e-5, 2
    from kernels.cpu_features import BYTES
    from kernels.draft_chain import cpu

    return "cpu", cpu.draft_chain, cpu.TOLERANCE, 1 if BYTES else 2


def _case(
    sizes: tuple[int, ...], counts: list[int], depths: list[int], device: torch.device
) -> Case:
    form, make, tolerance, stored = _form(device)
    drafted: Tensor = torch.arange(max(depths)) < torch.tensor(depths)[:, None]
    weights = cache(lambda: _weights(*sizes))
    start = cache(lambda: _start(sizes[0], sizes[2], counts, depths))
    chain = cache(lambda: make(weights()))

    def outcome(chain: Chain, weights: ChainWeights, start: ChainStart) -> list[Tensor]:
        ids, logprobs = map(torch.from_numpy, chain(start))
        return [ids[drafted], logprobs[drafted], weights.pages.k, weights.pages.v]

    def run() -> list[Tensor]:
        pages = KvPages(weights().pages.k.clone(), weights().pages.v.clone())
        own = replace(weights(), pages=pages)
        return outcome(make(own), own, start())

    def truth() -> list[Tensor]:
        w, s = weights(), start()
        pages = KvPages(w.pages.k.double(), w.pages.v.double())
        wide = replace(s, hidden=s.hidden.double())
        own = replace(w, pages=pages)
        return outcome(partial(naive.draft_chain, own), own, wide)

    width, inner, vocabulary, heads, kv_heads, dim = sizes
    matrix = width * (2 * width + (3 * heads + 2 * kv_heads) * dim + 3 * inner + vocabulary)
    return Case(
        name=f"{form} width {width} rows {sum(counts)} drafts {sum(depths)}",
        dtype=torch.float32,
        run=run,
        truth=truth,
        step=lambda: chain()(start()),
        # The fewer terms a sum has, the less do its roundings cancel.
        tolerance=tolerance * (1 if width >= 256 else 2),
        bytes=stored * matrix * (1 + max(depths)),
        flops=2 * matrix * (sum(counts) + sum(depths)),
    )


def _weights(
    width: int, inner: int, vocabulary: int, heads: int, kv_heads: int, dim: int
) -> ChainWeights:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def matrix(rows: int, columns: int) -> Tensor:
        return random(rows, columns).div(float(columns) ** 0.5).bfloat16()

    def scale(size: int) -> Tensor:
        return 1 + random(size) * 0.1

    angle = torch.arange(4 * PAGE)[:, None] * 10000.0 ** (-torch.arange(dim // 8) / (dim // 8))
    return ChainWeights(
        embed=matrix(vocabulary, width),
        fc=matrix(width, 2 * width),
        qkv=matrix(2 * (heads + kv_heads) * dim, width),
        o=matrix(width, heads * dim),
        gate_up=matrix(2 * inner, width),
        down=matrix(width, inner),
        # Far apart, so that rounding cannot change which token is best.
        head=matrix(vocabulary, width) * 4,
        norm_embedding=scale(width),
        norm_hidden=scale(width),
        input_norm=scale(width),
        post_norm=scale(width),
        norm=scale(width),
        attention=AttentionParams(
            q_norm=scale(dim),
            k_norm=scale(dim),
            cos=angle.cos(),
            sin=angle.sin(),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=dim,
            eps=1e-6,
        ),
        pages=KvPages(
            k=random(17, kv_heads, dim, PAGE),
            v=random(17, kv_heads, PAGE, dim),
        ),
    )


def _start(width: int, vocabulary: int, counts: list[int], depths: list[int]) -> ChainStart:
    """Sequences that end near a page's edge, each with four blocks of its own."""
    rows, ends = sum(counts), [62 + 3 * i for i in range(len(counts))]
    generator = torch.Generator().manual_seed(2)
    return ChainStart(
        tokens=np.arange(5, 5 + rows) % vocabulary,
        hidden=torch.randn(rows, width, generator=generator),
        row_start=np.cumsum([0, *counts]),
        begins=np.array([end - n + 1 for n, end in zip(counts, ends, strict=True)]),
        first_hidden=np.cumsum([0, *counts])[:-1],
        block_tables=np.arange(4 * len(counts)).reshape(len(counts), 4),
        first_key=np.zeros(len(counts), np.int64),
        depths=np.array(depths),
    )
