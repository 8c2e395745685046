"""The maximum and the sum of exponentials of fixed pieces of a row, then of the pieces.

A row is cut in the same places however many rows there are, so its bits do not depend on them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_guard import guard

# Numbers in a piece: 122 programs for a row of 248,320, which fill a card at one row.
PIECE = 2048
LARGEST = 1 << 22


@triton.jit
def _pieces(
    p_logits: tl.tensor,
    p_best: tl.tensor,
    p_total: tl.tensor,
    p_place: tl.tensor,
    stride: tl.tensor,
    width: tl.tensor,
    pieces: tl.tensor,
    PIECE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    o_column = piece * PIECE + tl.arange(0, PIECE)
    m_column = o_column < width
    p_row = p_logits + row * stride + o_column
    b_x = tl.load(p_row, mask=m_column, other=float("-inf")).to(tl.float32)
    # NaN is no maximum, but it stays in the sum, where it is seen.
    b_number = tl.where(b_x == b_x, b_x, float("-inf"))
    best = tl.max(b_number, axis=0)
    # A piece of which all is masked out has no finite maximum, and adds nothing.
    base = tl.where(best == float("-inf"), 0.0, best)
    total = tl.sum(tl.exp(b_x - base), axis=0)
    place = tl.min(tl.where((b_number == best) & m_column, o_column, width - 1), axis=0)
    tl.store(p_best + row * pieces + piece, best)
    tl.store(p_total + row * pieces + piece, total)
    tl.store(p_place + row * pieces + piece, place)


@triton.jit
def _join(
    p_best: tl.tensor,
    p_total: tl.tensor,
    p_place: tl.tensor,
    p_ids: tl.tensor,
    p_logprobs: tl.tensor,
    pieces: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    o_piece = tl.arange(0, BLOCK)
    m_piece = o_piece < pieces
    o_piece = row * pieces + o_piece
    b_best = tl.load(p_best + o_piece, mask=m_piece, other=float("-inf"))
    b_total = tl.load(p_total + o_piece, mask=m_piece, other=0.0)
    b_place = tl.load(p_place + o_piece, mask=m_piece, other=0)
    best = tl.max(b_best, axis=0)
    base = tl.where(best == float("-inf"), 0.0, best)
    total = tl.sum(b_total * tl.exp(b_best - base), axis=0)
    place = tl.min(tl.where((b_best == best) & m_piece, b_place, width - 1), axis=0)
    tl.store(p_ids + row, place.to(tl.int64))
    # Where all is masked out the log-probability is -inf.
    total = tl.where(total == 0.0, 1.0, total)
    tl.store(p_logprobs + row, best - base - tl.log(total))


def top1(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits [n, V] -> (ids [n] int64, log-probabilities [n] float32); ties: lowest id.

    Raises:
        UnsupportedKernelError: no kernel for this dtype, vocabulary or device.
    """
    rows, width = logits.shape
    guard("top1", logits, width, LARGEST, "vocabulary V")
    assert logits.stride(1) == 1
    ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        pieces = triton.cdiv(width, PIECE)
        best = torch.empty(rows, pieces, dtype=torch.float32, device=logits.device)
        total = torch.empty(rows, pieces, dtype=torch.float32, device=logits.device)
        place = torch.empty(rows, pieces, dtype=torch.int32, device=logits.device)
        _pieces[rows, pieces](
            logits, best, total, place, logits.stride(0), width, pieces, PIECE=PIECE, num_warps=4
        )
        block = triton.next_power_of_2(pieces)
        _join[(rows,)](best, total, place, ids, logprobs, pieces, width, BLOCK=block, num_warps=1)
    return ids, logprobs
