"""From projected rows to what the recurrence takes: convolution, normalised q and k, v, g and beta.

Knows ragged rows, slots and rings, not the recurrence. Reads conv state and ring and writes
neither: heads share channels, so both are written by a later launch (triton_finish.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.batch import RaggedBatch
from kernels.gdn.types import GdnParams, GdnState

# A row of a head lies in one warp, so its sums take the same order whatever its neighbours are; the
# same number for every step, since the compiler chooses the layout by the shape of the block.
ROWS_PER_PROGRAM = 8
# Views at any place of one buffer: whether such a pointer is a multiple of 16 bytes must not decide
# which variant runs, or one would be compiled while requests wait.
INDEX_POINTERS = (
    "p_row_segment",
    "p_row_start",
    "p_starts",
    "p_slots",
    "p_committed",
    "p_pending",
    "p_ring_first",
    "p_ring_rows",
    "p_snapshots",
    "p_chunked",
    "p_saves",
)


@dataclass(frozen=True, slots=True)
class GdnInputs:
    """Float32 inputs of the recurrence; R own rows, then D places for the pending rows of each
    sequence (D the depth of the ring), so that every size is known to the host.

    Attributes:
        q, k: [R + S D, Hk, Dk] normalised, q scaled by Dk^-0.5.
        v: [R + S D, Hv, Dv]; the recurrence leaves its output in the place of own rows.
        gates: [R + S D, 2, Hv] g and beta.
        rows: R.
        ring: D.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gates: Tensor
    rows: int
    ring: int


@triton.jit
def own_inputs(
    p_proj: tl.tensor,
    b_row: tl.tensor,
    m_row: tl.tensor,
    o_column: tl.tensor,
    m_column: tl.tensor,
    stride: tl.tensor,
) -> tl.tensor:
    """[rows, columns] float32 of the projection, 0 where masked."""
    p_input = p_proj + b_row[:, None] * stride + o_column[None, :]
    return tl.load(p_input, mask=m_row[:, None] & m_column[None, :], other=0.0).to(tl.float32)


@triton.jit
def past_inputs(
    p_ring: tl.tensor,
    p_conv: tl.tensor,
    b_slot: tl.tensor,
    b_pending: tl.tensor,
    b_at: tl.tensor,
    m_past: tl.tensor,
    m_stored: tl.tensor,
    o_column: tl.tensor,
    m_column: tl.tensor,
    stride_ring_slot: tl.tensor,
    stride_ring_row: tl.tensor,
    stride_conv_slot: tl.tensor,
    TAPS: tl.constexpr,
) -> tl.tensor:
    """[rows, columns] float32 of what came before a sequence's own rows, 0 where masked.

    b_at counts from the first own row: -1 .. -pending lie in the ring, older inputs in the conv
    state, whose last column is the newest; m_stored is false where the slot's content is another's.
    """
    b_place = b_pending + b_at
    m_ring = (m_past & (b_place >= 0))[:, None] & m_column[None, :]
    p_pending = p_ring + b_slot[:, None] * stride_ring_slot + b_place[:, None] * stride_ring_row
    b_input = tl.load(p_pending + o_column[None, :], mask=m_ring, other=0.0).to(tl.float32)
    m_conv = (m_past & m_stored & (b_place < 0) & (b_place >= -TAPS))[:, None] & m_column[None, :]
    p_stored = p_conv + b_slot[:, None] * stride_conv_slot + (b_place + TAPS)[:, None]
    b_stored = tl.load(p_stored + o_column[None, :] * TAPS, mask=m_conv, other=0.0)
    # One of the two is a masked zero, so the sum is exact.
    return b_input + b_stored.to(tl.float32)


@triton.jit
def silu(x: tl.tensor) -> tl.tensor:
    """x / (1 + exp(-x)), with an exp that cannot overflow."""
    b_exp = tl.exp(-tl.abs(x))
    return x * tl.where(x >= 0, 1.0, b_exp) / (1.0 + b_exp)


@triton.jit
def _sigmoid(x: tl.tensor) -> tl.tensor:
    b_exp = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, b_exp) / (1.0 + b_exp)


@triton.jit
def _softplus(x: tl.tensor) -> tl.tensor:
    """max(x, 0) + log(1 + e), e = exp(-|x|), by 2 atanh(e / (2 + e)).

    The GPU's log is exact to 2^-22 near 1 only in absolute terms; this series has a relative
    error below 2e-8 for e up to 1, and needs no library.
    """
    b_exp = tl.exp(-tl.abs(x))
    b_s = b_exp / (2.0 + b_exp)
    b_s2 = b_s * b_s
    b_sum = 1.0 / 15.0 + b_s2 * (1.0 / 17.0)
    b_sum = 1.0 / 13.0 + b_s2 * b_sum
    b_sum = 1.0 / 11.0 + b_s2 * b_sum
    b_sum = 1.0 / 9.0 + b_s2 * b_sum
    b_sum = 1.0 / 7.0 + b_s2 * b_sum
    b_sum = 1.0 / 5.0 + b_s2 * b_sum
    b_sum = 1.0 / 3.0 + b_s2 * b_sum
    return tl.maximum(x, 0.0) + 2.0 * b_s * (1.0 + b_s2 * b_sum)


@triton.jit
def _convolved(
    p_proj: tl.tensor,
    p_weight: tl.tensor,
    p_ring: tl.tensor,
    p_conv: tl.tensor,
    b_first: tl.tensor,
    b_slot: tl.tensor,
    b_pending: tl.tensor,
    b_t: tl.tensor,
    m_row: tl.tensor,
    m_stored: tl.tensor,
    channel: tl.tensor,
    stride_proj: tl.tensor,
    stride_ring_slot: tl.tensor,
    stride_ring_row: tl.tensor,
    stride_conv_slot: tl.tensor,
    CONV_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """silu of the causal convolution, [ROWS, WIDTH] from `channel` on, taps oldest first."""
    o_column = channel + tl.arange(0, WIDTH)
    m_column = o_column < CONV_DIM
    # In long prompts few programs look back beyond their sequence's own rows.
    past = tl.min(tl.where(m_row, b_t, TAPS), 0) < TAPS - 1
    b_mixed = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        b_at = b_t + (tap - (TAPS - 1))
        b_input = own_inputs(
            p_proj, b_first + b_at, m_row & (b_at >= 0), o_column, m_column, stride_proj
        )
        if past:
            b_input += past_inputs(
                p_ring,
                p_conv,
                b_slot,
                b_pending,
                b_at,
                m_row & (b_at < 0),
                m_stored,
                o_column,
                m_column,
                stride_ring_slot,
                stride_ring_row,
                stride_conv_slot,
                TAPS,
            )
        b_weight = tl.load(p_weight + tap * CONV_DIM + o_column, mask=m_column, other=0.0)
        b_mixed += b_weight.to(tl.float32)[None, :] * b_input
    return silu(b_mixed)


@triton.jit
def _store_rows(
    p_rows: tl.tensor, b_x: tl.tensor, o_row: tl.tensor, m_row: tl.tensor, WIDTH: tl.constexpr
) -> None:
    """Store b_x [rows, WIDTH] in the rows o_row of a contiguous [.., WIDTH]."""
    o_width = tl.arange(0, WIDTH)
    m_x = m_row[:, None] & (o_width < WIDTH)[None, :]
    tl.store(p_rows + o_row[:, None] * WIDTH + o_width[None, :], b_x, mask=m_x)


@triton.jit
def _store_gates(
    p_proj: tl.tensor,
    p_decay: tl.tensor,
    p_dt_bias: tl.tensor,
    p_ring_gates: tl.tensor,
    p_gates: tl.tensor,
    b_slot: tl.tensor,
    b_place: tl.tensor,
    o_n: tl.tensor,
    m_new: tl.tensor,
    m_old: tl.tensor,
    head: tl.tensor,
    stride_proj: tl.tensor,
    stride_gates_slot: tl.tensor,
    stride_gates_row: tl.tensor,
    CONV_DIM: tl.constexpr,
    HV: tl.constexpr,
    DV: tl.constexpr,
) -> None:
    """g and beta of new rows from b and a, of pending rows from the ring."""
    p_b = p_proj + o_n * stride_proj + CONV_DIM + HV * DV + head
    b_b = tl.load(p_b, mask=m_new, other=0.0).to(tl.float32)
    b_a = tl.load(p_b + HV, mask=m_new, other=0.0).to(tl.float32)
    b_decay = tl.load(p_decay + head).to(tl.float32)
    b_bias = tl.load(p_dt_bias + head).to(tl.float32)
    p_old = p_ring_gates + b_slot * stride_gates_slot + b_place * stride_gates_row + head
    b_old_g = tl.load(p_old, mask=m_old, other=0.0).to(tl.float32)
    b_old_beta = tl.load(p_old + HV, mask=m_old, other=0.0).to(tl.float32)
    p_gate = p_gates + o_n * (2 * HV) + head
    b_g = tl.where(m_new, b_decay * _softplus(b_a + b_bias), b_old_g)
    tl.store(p_gate, b_g, mask=m_new | m_old)
    tl.store(p_gate + HV, tl.where(m_new, _sigmoid(b_b), b_old_beta), mask=m_new | m_old)


@triton.jit(
    do_not_specialize=["rows", "segments", "ring"], do_not_specialize_on_alignment=INDEX_POINTERS
)
def _inputs(
    p_proj: tl.tensor,
    p_weight: tl.tensor,
    p_decay: tl.tensor,
    p_dt_bias: tl.tensor,
    p_ring: tl.tensor,
    p_ring_gates: tl.tensor,
    p_conv: tl.tensor,
    p_row_segment: tl.tensor,
    p_row_start: tl.tensor,
    p_starts: tl.tensor,
    p_slots: tl.tensor,
    p_pending: tl.tensor,
    p_q: tl.tensor,
    p_k: tl.tensor,
    p_v: tl.tensor,
    p_gates: tl.tensor,
    rows: tl.tensor,
    segments: tl.tensor,
    ring: tl.tensor,
    stride_proj: tl.tensor,
    stride_ring_slot: tl.tensor,
    stride_ring_row: tl.tensor,
    stride_gates_slot: tl.tensor,
    stride_gates_row: tl.tensor,
    stride_conv_slot: tl.tensor,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    TAPS: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """One program per (ROWS rows, key head or value head)."""
    CONV_DIM: tl.constexpr = 2 * HK * DK + HV * DV
    unit = tl.program_id(1)
    o_n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m_own = o_n < rows
    o_place = tl.where(m_own, 0, o_n - rows)
    b_owner = tl.load(p_row_segment + o_n, mask=m_own, other=0)
    b_segment = tl.where(m_own, b_owner, o_place // ring)
    m_segment = (b_segment >= 0) & (b_segment < segments)
    b_first = tl.load(p_row_start + b_segment, mask=m_segment, other=0)
    b_end = tl.load(p_row_start + b_segment + 1, mask=m_segment, other=0)
    b_slot = tl.load(p_slots + b_segment, mask=m_segment, other=0)
    b_pending = tl.load(p_pending + b_segment, mask=m_segment, other=0)
    m_stored = tl.load(p_starts + b_segment, mask=m_segment, other=0) != 0
    b_place = o_place % ring
    # Rows that no sequence owns and places without a pending row are left out.
    m_row = m_own & (o_n >= b_first) & (o_n < b_end)
    m_row = m_segment & (m_row | ((o_n >= rows) & (b_place < b_pending)))
    b_t = tl.where(m_own, o_n - b_first, b_place - b_pending)

    if unit < HK:
        for part in tl.static_range(2):
            b_x = _convolved(
                p_proj,
                p_weight,
                p_ring,
                p_conv,
                b_first,
                b_slot,
                b_pending,
                b_t,
                m_row,
                m_stored,
                (part * HK + unit) * DK,
                stride_proj,
                stride_ring_slot,
                stride_ring_row,
                stride_conv_slot,
                CONV_DIM,
                TAPS,
                DK,
                ROWS,
            )
            # The epsilon is inside the root, on the sum.
            b_x *= tl.rsqrt(tl.sum(b_x * b_x, 1) + 1e-6)[:, None]
            if part == 0:
                _store_rows(p_q, b_x * SCALE, o_n * HK + unit, m_row, DK)
            else:
                _store_rows(p_k, b_x, o_n * HK + unit, m_row, DK)
    else:
        head = unit - HK
        b_v = _convolved(
            p_proj,
            p_weight,
            p_ring,
            p_conv,
            b_first,
            b_slot,
            b_pending,
            b_t,
            m_row,
            m_stored,
            2 * HK * DK + head * DV,
            stride_proj,
            stride_ring_slot,
            stride_ring_row,
            stride_conv_slot,
            CONV_DIM,
            TAPS,
            DV,
            ROWS,
        )
        _store_rows(p_v, b_v, o_n * HV + head, m_row, DV)
        _store_gates(
            p_proj,
            p_decay,
            p_dt_bias,
            p_ring_gates,
            p_gates,
            b_slot,
            b_place,
            o_n,
            m_row & m_own,
            m_row & (o_n >= rows),
            head,
            stride_proj,
            stride_gates_slot,
            stride_gates_row,
            CONV_DIM,
            HV,
            DV,
        )


def gdn_inputs(proj: Tensor, params: GdnParams, state: GdnState, batch: RaggedBatch) -> GdnInputs:
    """Convolve and gate every own and pending row; arguments as those of naive.gdn_mixer."""
    rows, segments, ring = proj.shape[0], batch.slots.shape[0], state.ring_inputs.shape[1]
    hk, hv, dk, dv = (
        params.key_heads,
        params.value_heads,
        params.key_width,
        params.value_width,
    )
    total = rows + segments * ring

    def scratch(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=proj.device)

    inputs = GdnInputs(
        q=scratch(total, hk, dk),
        k=scratch(total, hk, dk),
        v=scratch(total, hv, dv),
        gates=scratch(total, 2, hv),
        rows=rows,
        ring=ring,
    )
    if total:
        _inputs[(triton.cdiv(total, ROWS_PER_PROGRAM), hk + hv)](
            proj,
            params.conv,
            params.decay,
            params.dt_bias,
            state.ring_inputs,
            state.ring_gates,
            state.conv,
            batch.row_segment,
            batch.row_start,
            batch.starts,
            batch.slots,
            batch.pending,
            inputs.q,
            inputs.k,
            inputs.v,
            inputs.gates,
            rows,
            segments,
            # Never divided by: without a ring no program looks past the own rows.
            max(ring, 1),
            proj.stride(0),
            state.ring_inputs.stride(0),
            state.ring_inputs.stride(1),
            state.ring_gates.stride(0),
            state.ring_gates.stride(1),
            state.conv.stride(0),
            HK=hk,
            HV=hv,
            DK=dk,
            DV=dv,
            TAPS=params.conv.shape[0],
            SCALE=dk**-0.5,
            ROWS=ROWS_PER_PROGRAM,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return inputs
