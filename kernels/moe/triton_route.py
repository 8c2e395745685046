"""Which experts a row goes to, and which rows a tile takes: all on the device, in fixed shapes.

Knows logits and expert numbers, not what an expert computes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

# Rows of a tile, at every number of rows: a row's bits must not depend on its neighbours, and an
# expert of 256 gets one row in most decode steps.
BLOCK_M = 16
CHUNK = 1024
MOST_EXPERTS = 1024


@dataclass(frozen=True, slots=True)
class Tiles:
    """Pairs of a row and one of its experts, sorted by expert in tiles of BLOCK_M.

    Attributes:
        pairs: [tiles * BLOCK_M] int32 pair number row * k + rank; R k where a tile is not full.
        experts: [tiles] int32 expert of each tile, -1 for tiles that are not needed.
    """

    pairs: Tensor
    experts: Tensor


@triton.jit
def _route(
    p_logits: tl.tensor,
    p_weights: tl.tensor,
    p_ids: tl.tensor,
    stride: tl.tensor,
    experts: tl.tensor,
    TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    o_expert = tl.arange(0, BLOCK)
    m_expert = o_expert < experts
    p_row = p_logits + row * stride + o_expert
    b_logit = tl.load(p_row, mask=m_expert, other=float("-inf")).to(tl.float32)
    # NaN must still choose k experts that exist; it stays in the weights, where it is seen.
    b_key = tl.where(b_logit == b_logit, b_logit, float("-inf"))
    best = tl.max(b_key, axis=0)
    b_weight = tl.exp(b_logit - tl.where(best == float("-inf"), 0.0, best))
    b_weight = b_weight / tl.sum(b_weight, axis=0)
    b_free = m_expert
    for _ in range(TOP_K):
        b_left = tl.where(b_free, b_key, float("-inf"))
        top = tl.max(b_left, axis=0)
        place = tl.min(tl.where(b_free & (b_left == top), o_expert, BLOCK), axis=0)
        b_free = b_free & (o_expert != place)
    b_chosen = m_expert ^ b_free
    if RENORMALISE:
        b_weight = b_weight / tl.sum(tl.where(b_chosen, b_weight, 0.0), axis=0)
    # In rising order of the expert: this is the order in which a row's outputs are added.
    b_rank = tl.cumsum(b_chosen.to(tl.int32), axis=0) - 1
    tl.store(p_weights + row * TOP_K + b_rank, b_weight, mask=b_chosen)
    tl.store(p_ids + row * TOP_K + b_rank, o_expert, mask=b_chosen)


@triton.jit(do_not_specialize=["pairs"])
def _count(p_ids: tl.tensor, p_counts: tl.tensor, pairs: tl.tensor, CHUNK: tl.constexpr) -> None:
    expert = tl.program_id(0)
    b_count = tl.zeros((CHUNK,), dtype=tl.int32)
    for first in range(0, pairs, CHUNK):
        o_pair = first + tl.arange(0, CHUNK)
        b_id = tl.load(p_ids + o_pair, mask=o_pair < pairs, other=-1)
        b_count += (b_id == expert).to(tl.int32)
    tl.store(p_counts + expert, tl.sum(b_count, axis=0))


@triton.jit(do_not_specialize=["pairs", "tiles"])
def _place(
    p_ids: tl.tensor,
    p_counts: tl.tensor,
    p_pairs: tl.tensor,
    p_experts: tl.tensor,
    pairs: tl.tensor,
    tiles: tl.tensor,
    experts: tl.tensor,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    expert = tl.program_id(0)
    o_expert = tl.arange(0, BLOCK)
    b_count = tl.load(p_counts + o_expert, mask=o_expert < experts, other=0)
    b_tiles = (b_count + BLOCK_M - 1) // BLOCK_M
    first_tile = tl.sum(tl.where(o_expert < expert, b_tiles, 0), axis=0)
    o_chunk = tl.arange(0, CHUNK)
    if expert < experts:
        count = tl.sum(tl.where(o_expert == expert, b_count, 0), axis=0)
        end_tile = first_tile + (count + BLOCK_M - 1) // BLOCK_M
        for tile in range(first_tile, end_tile, CHUNK):
            o_tile = tile + o_chunk
            b_expert = tl.zeros((CHUNK,), dtype=tl.int32) + expert
            tl.store(p_experts + o_tile, b_expert, mask=o_tile < end_tile)
        # Pairs in the order of the rows, then what the last tile has left over.
        place = first_tile * BLOCK_M
        for first in range(0, pairs, CHUNK):
            o_pair = first + o_chunk
            b_id = tl.load(p_ids + o_pair, mask=o_pair < pairs, other=-1)
            b_mine = (b_id == expert).to(tl.int32)
            o_place = place + tl.cumsum(b_mine, axis=0) - 1
            tl.store(p_pairs + o_place, o_pair, mask=b_mine > 0)
            place += tl.sum(b_mine, axis=0)
        o_rest = place + tl.arange(0, BLOCK_M)
        b_none = tl.zeros((BLOCK_M,), dtype=tl.int32) + pairs
        tl.store(p_pairs + o_rest, b_none, mask=o_rest < end_tile * BLOCK_M)
    else:
        for tile in range(first_tile, tiles, CHUNK):
            o_tile = tile + o_chunk
            b_expert = tl.zeros((CHUNK,), dtype=tl.int32) - 1
            tl.store(p_experts + o_tile, b_expert, mask=o_tile < tiles)


def route(logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """logits [R, E] -> (weights [R, k] float32, ids [R, k] int32), ids rising in each row.

    Softmax over all, then the k largest; of equal logits the lower id.
    """
    rows, experts = logits.shape
    assert logits.stride(1) == 1
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, top_k, dtype=torch.int32, device=logits.device)
    block = triton.next_power_of_2(experts)
    _route[(rows,)](
        logits,
        weights,
        ids,
        logits.stride(0),
        experts,
        TOP_K=top_k,
        RENORMALISE=renormalise,
        BLOCK=block,
        num_warps=1 if block <= 256 else 4,
    )
    return weights, ids


def most_tiles(pairs: int, experts: int) -> int:
    """Tiles that `pairs` may need at worst: every expert in use has one that is not full."""
    return (pairs + min(pairs, experts) * (BLOCK_M - 1)) // BLOCK_M


def make_tiles(ids: Tensor, experts: int) -> Tiles:
    """ids [R, k] int32 of `experts` experts -> tiles, without a word to the host."""
    pairs = ids.numel()
    tiles = most_tiles(pairs, experts)
    counts = torch.empty(experts, dtype=torch.int32, device=ids.device)
    placed = torch.empty(tiles * BLOCK_M, dtype=torch.int32, device=ids.device)
    owners = torch.empty(tiles, dtype=torch.int32, device=ids.device)
    _count[(experts,)](ids, counts, pairs, CHUNK=CHUNK, num_warps=4)
    _place[(experts + 1,)](
        ids,
        counts,
        placed,
        owners,
        pairs,
        tiles,
        experts,
        BLOCK_M=BLOCK_M,
        CHUNK=CHUNK,
        BLOCK=triton.next_power_of_2(experts),
        num_warps=4,
    )
    return Tiles(placed, owners)
