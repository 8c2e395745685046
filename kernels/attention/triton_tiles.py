"""The inner loop of attention, for decode and prefill: tiles of keys past one tile of queries."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def query_tile(
    p_q: tl.tensor,
    p_positions: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    head: tl.tensor,
    kv_heads: tl.tensor,
    line: tl.tensor,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    LINES: tl.constexpr,
) -> tl.tensor:
    """(q [LINES, WIDTH], positions [LINES], where a line is in [rows, nH], which lines are there).

    Line l of the query rows first .. end is row l // GROUP, query head l % GROUP of KV head `head`;
    the tile starts at `line`. Lines that are not there are at position -1, where nothing is seen.
    """
    o_line = line + tl.arange(0, LINES)
    o_row = first + o_line // GROUP
    m_line = o_row < end
    b_position = tl.load(p_positions + o_row, mask=m_line, other=-1).to(tl.int32)
    o_place = o_row.to(tl.int64) * (kv_heads * GROUP) + head * GROUP + o_line % GROUP
    o_width = tl.arange(0, WIDTH)
    p_lines = p_q + o_place[:, None] * WIDTH + o_width[None, :]
    b_q = tl.load(p_lines, mask=m_line[:, None], other=0.0)
    return b_q, b_position, o_place, m_line


@triton.jit
def attend(
    b_q: tl.tensor,
    b_position: tl.tensor,
    oldest: tl.tensor,
    first_tile: tl.tensor,
    end_tile: tl.tensor,
    p_k: tl.tensor,
    p_v: tl.tensor,
    p_table: tl.tensor,
    block_stride: tl.tensor,
    scale: tl.tensor,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    LINES: tl.constexpr,
    DOT: tl.constexpr,
) -> tl.tensor:
    """(sum of w v [LINES, WIDTH], peak [LINES], sum of w [LINES]) with w = exp2(score - peak).

    Over the keys of the tiles first_tile .. end_tile that a line sees: oldest .. its position.
    Tiles lie on absolute positions and come in order, and a tile of which a line sees nothing
    changes no bit of it (factor 1, plus 0): the result is the same whichever lines are beside it.

    p_k, p_v point at the KV head in block 0; p_table at the sequence's block table.
    """
    o_width = tl.arange(0, WIDTH)
    o_key = tl.arange(0, KEYS)
    newest = tl.max(b_position, 0)
    # Lower than any score, and finite: minus infinity less itself would be NaN.
    b_peak = tl.full([LINES], -1.0e30, tl.float32)
    b_sum = tl.zeros([LINES], tl.float32)
    b_mixed = tl.zeros([LINES, WIDTH], tl.float32)
    # Carried over to the next tile: a load that waits for another one in its own turn of the loop
    # halves the depth of the pipeline (triton 3.6).
    block = tl.load(p_table + first_tile * KEYS // PAGE)
    for tile in range(first_tile, end_tile):
        key = tile * KEYS
        # A product, so that triton 3.6 too knows what it divides by, for the 16-byte loads.
        place = tile % (PAGE // KEYS) * KEYS
        # No mask along the tokens, which lie innermost: it would break 16-byte loads in 2-byte
        # ones. What lies behind the last token in its page is overwritten in the scores.
        p_tile_k = p_k + block * block_stride + place
        b_k = tl.load(p_tile_k + o_width[:, None] * PAGE + o_key[None, :])
        b_score = tl.dot(b_q.to(DOT), b_k.to(DOT), input_precision="ieee") * scale
        b_at = key + o_key
        m_seen = (b_at[None, :] <= b_position[:, None]) & (b_at[None, :] >= oldest)
        b_score = tl.where(m_seen, b_score, float("-inf"))
        b_new = tl.maximum(b_peak, tl.max(b_score, 1))
        # Rounded as the activations are before they are summed: what they weigh is what they add.
        b_weight = tl.exp2(b_score - b_new[:, None]).to(b_q.dtype)
        b_rescale = tl.exp2(b_peak - b_new)
        b_sum = b_sum * b_rescale + tl.sum(b_weight.to(tl.float32), 1)
        # Masked, since 0 * NaN is NaN: nobody wrote these rows, or an earlier tenant did.
        m_value = (b_at <= newest) & (b_at >= oldest)
        p_tile_v = p_v + block * block_stride + place * WIDTH
        b_v = tl.load(
            p_tile_v + o_key[:, None] * WIDTH + o_width[None, :], mask=m_value[:, None], other=0.0
        )
        b_mixed = b_mixed * b_rescale[:, None]
        b_mixed = tl.dot(b_weight.to(DOT), b_v.to(DOT), b_mixed, input_precision="ieee")
        b_peak = b_new
        block = tl.load(p_table + (key + KEYS) // PAGE, mask=tile + 1 < end_tile, other=0)
    return b_mixed, b_peak, b_sum


@triton.jit
def sigmoid(b_x: tl.tensor) -> tl.tensor:
    """1 / (1 + exp(-x)) with exp of what is never positive: no overflow."""
    b_exp = tl.exp(-tl.abs(b_x))
    return tl.where(b_x >= 0, 1.0, b_exp) / (1.0 + b_exp)
