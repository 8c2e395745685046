"""What the launches of the attention mixer share: which rows ask, and which tiles they go through.

Knows rows and sequences, not pages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.types import AttentionParams
from kernels.batch import RaggedBatch
from kernels.triton_guard import dot_dtype

# Index tensors are slices of one upload and their lengths change from step to step: a kernel that
# was compiled for what their addresses and widths divide by would be compiled again in service.
INDEX_POINTERS = [
    "p_rows",
    "p_owners",
    "p_positions",
    "p_start",
    "p_first_key",
    "p_chunked",
    "p_tables",
]


@dataclass(frozen=True, slots=True)
class Queries:
    """The n rows whose attention is asked for, in the order of the step.

    Attributes:
        rows: [n] int64, ascending, their rows in the step; None where they are all of them.
        positions, owners: [n] int64, position and sequence of each.
        start: [S + 1] int64, first of each sequence among the n, then n.
        count: n.
        longest: most of them that one sequence may have.
    """

    rows: Tensor | None
    positions: Tensor
    owners: Tensor
    start: Tensor
    count: int
    longest: int


def queries(batch: RaggedBatch, wanted: Tensor | None) -> Queries:
    """The rows that `wanted` [n] int64, ascending, names; all rows when it is None."""
    if wanted is None:
        return Queries(
            None,
            batch.positions,
            batch.row_segment,
            batch.row_start,
            batch.positions.shape[0],
            batch.longest,
        )
    n = wanted.shape[0]
    return Queries(
        wanted,
        batch.positions[wanted],
        batch.row_segment[wanted],
        torch.searchsorted(wanted, batch.row_start),
        n,
        min(batch.longest, n),
    )


@dataclass(frozen=True, slots=True)
class Shape:
    """What a kernel is compiled for; the same for every step of a model.

    Attributes:
        group: query heads that share a KV head.
        kv_heads, width, page: nKV, hd, tokens of a page.
        lines: query rows times heads of a group in one tile.
        keys: tokens in one tile; divides the page.
        warps, stages: of a program; depth of its pipeline of page loads.
        dot: dtype of the operands of the products.
    """

    group: int
    kv_heads: int
    width: int
    page: int
    lines: int
    keys: int
    warps: int
    stages: int
    dot: Any

    @property
    def scale(self) -> float:
        """Of the scores, for exp2 in place of exp: log2(e) / sqrt(hd)."""
        return math.log2(math.e) / math.sqrt(self.width)


def shape_of(params: AttentionParams, page: int, dtype: torch.dtype, prefill: bool) -> Shape:
    """Tiles for activations of `dtype`.

    They depend on nothing that changes from step to step: a row then goes through the same
    instructions alone, among others, and at any number of verify rows.
    """
    group = params.heads // params.kv_heads
    # One verify of four rows fits a tile: groups of up to 4 on 0.8B, of 6 on 27B. Fewer than 64
    # lines on purpose: Hopper would go over to other matrix instructions there.
    lines, warps, stages = 16 if group <= 4 else 32, 4, 3
    if prefill and roomy():
        lines, warps = 128, 8
    elif prefill:
        # 64 lines in two stages are 75 KiB.
        lines, warps, stages = 64, 4, 2
    if dtype.itemsize == 4:
        # Products of float32 run without tensor cores and keep whole operands in registers: 32
        # lines spill 10 KiB a thread.
        lines, warps, stages = 16, 4, 1
    # 16 KiB a tile of K or V in bfloat16 at hd 256. Decode: 84 KiB and 255 registers as compiled
    # for sm_90 by triton 3.6, so two programs an SM, each with a tile on its way while it works on
    # the one before: 64 KiB in flight, where latency times bandwidth asks for some 30. Prefill:
    # 160 KiB of 227.
    keys = 64 if params.head_dim * dtype.itemsize <= 256 else 32
    return Shape(
        group=group,
        kv_heads=params.kv_heads,
        width=params.head_dim,
        page=page,
        lines=lines,
        keys=min(keys, largest_power_in(page)),
        warps=warps,
        stages=stages,
        dot=dot_dtype(dtype),
    )


def roomy() -> bool:
    """Whether a block may use 160 KiB of shared memory: on cards of data centres, not on others."""
    if triton.knobs.runtime.interpret:
        return True
    return triton.runtime.driver.active.get_current_target().arch in (80, 90, 100, 103)


def largest_power_in(page: int) -> int:
    """The largest power of two that divides a page's tokens."""
    return page & -page


@triton.jit
def recurrent_before(p_start: tl.tensor, p_chunked: tl.tensor, segment: tl.tensor) -> tl.tensor:
    """Query rows of the sequences before `segment` that are not chunked."""
    b_total = tl.zeros([64], tl.int64)
    for base in range(0, segment, 64):
        o_segment = base + tl.arange(0, 64)
        m_before = o_segment < segment
        b_first = tl.load(p_start + o_segment, mask=m_before, other=0)
        b_end = tl.load(p_start + o_segment + 1, mask=m_before, other=0)
        b_chunked = tl.load(p_chunked + o_segment, mask=m_before, other=1)
        b_total += tl.where(b_chunked == 0, b_end - b_first, 0)
    return tl.sum(b_total)
