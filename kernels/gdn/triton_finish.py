"""What follows the recurrence: the gated norm, and the conv state and ring of the next step.

Knows rows, slots and rings, not the recurrence. Runs after every reader of conv state and ring.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.batch import RaggedBatch
from kernels.gdn.triton_inputs import (
    INDEX_POINTERS,
    ROWS_PER_PROGRAM,
    GdnInputs,
    own_inputs,
    past_inputs,
    silu,
)
from kernels.gdn.types import GdnParams, GdnState

# Channels of conv state and ring that one program owns.
CHANNELS = 128


@triton.jit
def _gated_norm(
    p_out: tl.tensor,
    p_v: tl.tensor,
    p_proj: tl.tensor,
    p_norm: tl.tensor,
    p_row_segment: tl.tensor,
    p_row_start: tl.tensor,
    block: tl.tensor,
    head: tl.tensor,
    rows: tl.tensor,
    segments: tl.tensor,
    stride_proj: tl.tensor,
    eps: tl.tensor,
    CONV_DIM: tl.constexpr,
    HV: tl.constexpr,
    DV: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """scale * o / sqrt(mean o^2 + eps) * silu(z) for ROWS rows of a head."""
    o_n = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_column = head * DV + tl.arange(0, DV)
    m_n = o_n < rows
    b_segment = tl.load(p_row_segment + o_n, mask=m_n, other=-1)
    m_owned = (b_segment >= 0) & (b_segment < segments)
    m_owned &= o_n >= tl.load(p_row_start + b_segment, mask=m_owned, other=0)
    m_owned &= o_n < tl.load(p_row_start + b_segment + 1, mask=m_owned, other=0)
    m_row = m_owned[:, None] & (o_column < HV * DV)[None, :]
    o_row = o_n[:, None] * (HV * DV) + o_column[None, :]
    b_o = tl.load(p_v + o_row, mask=m_row, other=0.0)
    p_z = p_proj + o_n[:, None] * stride_proj + CONV_DIM + o_column[None, :]
    b_z = tl.load(p_z, mask=m_row, other=0.0).to(tl.float32)
    b_scale = tl.load(p_norm + tl.arange(0, DV)).to(tl.float32)
    b_inverse = tl.rsqrt(tl.sum(b_o * b_o, 1) / DV + eps)
    b_out = b_scale[None, :] * (b_o * b_inverse[:, None]) * silu(b_z)
    # Rows that no sequence owns become zero: a NaN there would travel through the layers above.
    m_out = m_n[:, None] & (o_column < HV * DV)[None, :]
    tl.store(p_out + o_row, b_out.to(p_out.dtype.element_ty), mask=m_out)


@triton.jit
def _keep(
    p_proj: tl.tensor,
    p_gates: tl.tensor,
    p_ring: tl.tensor,
    p_ring_gates: tl.tensor,
    p_conv: tl.tensor,
    p_snapshot_conv: tl.tensor,
    p_row_start: tl.tensor,
    p_starts: tl.tensor,
    p_slots: tl.tensor,
    p_committed: tl.tensor,
    p_pending: tl.tensor,
    p_ring_first: tl.tensor,
    p_ring_rows: tl.tensor,
    p_snapshots: tl.tensor,
    segment: tl.tensor,
    block: tl.tensor,
    stride_proj: tl.tensor,
    stride_ring_slot: tl.tensor,
    stride_ring_row: tl.tensor,
    stride_gates_slot: tl.tensor,
    stride_gates_row: tl.tensor,
    stride_conv_slot: tl.tensor,
    stride_snapshot_slot: tl.tensor,
    stride_snapshot_row: tl.tensor,
    CONV_DIM: tl.constexpr,
    RING_WIDTH: tl.constexpr,
    HV: tl.constexpr,
    HV_BLOCK: tl.constexpr,
    TAPS: tl.constexpr,
    TAPS_BLOCK: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """Conv state, conv snapshots and ring of CHANNELS channels of a sequence."""
    first = tl.load(p_row_start + segment)
    own = tl.load(p_row_start + segment + 1) - first
    slot = tl.load(p_slots + segment)
    pending = tl.load(p_pending + segment)
    o_tap = tl.arange(0, TAPS_BLOCK)
    o_column = block * CHANNELS + tl.arange(0, CHANNELS)
    m_column = o_column < CONV_DIM
    b_zero = tl.zeros([TAPS_BLOCK], dtype=tl.int64)
    m_stored = (b_zero + tl.load(p_starts + segment)) != 0
    m_tap = o_tap < TAPS
    o_conv = o_column[None, :] * TAPS + o_tap[:, None]
    m_conv = m_column[None, :] & m_tap[:, None]
    snapshots = tl.where(tl.load(p_snapshots + segment) >= 0, own, 0)
    # The windows after own rows 1 .. own, and last the one that the state keeps; an empty sequence
    # pads a captured batch and keeps nothing.
    windows = tl.where(own + pending > 0, snapshots + 1, 0)
    for i in range(windows.to(tl.int32)):
        last = i == snapshots
        end = tl.where(last, tl.load(p_committed + segment), i + 1)
        b_at = b_zero + end - TAPS + o_tap
        b_input = own_inputs(
            p_proj, first + b_at, m_tap & (b_at >= 0), o_column, m_column, stride_proj
        )
        b_input += past_inputs(
            p_ring,
            p_conv,
            b_zero + slot,
            b_zero + pending,
            b_at,
            m_tap & (b_at < 0),
            m_stored,
            o_column,
            m_column,
            stride_ring_slot,
            stride_ring_row,
            stride_conv_slot,
            TAPS,
        )
        if last:
            # A window is shifted in place by lanes that may not be those that read it.
            tl.debug_barrier()
            tl.store(p_conv + slot * stride_conv_slot + o_conv, b_input, mask=m_conv)
        else:
            p_after = p_snapshot_conv + slot * stride_snapshot_slot + i * stride_snapshot_row
            tl.store(p_after + o_conv, b_input, mask=m_conv)

    left = tl.load(p_ring_first + segment) + first
    m_ring = o_column < RING_WIDTH
    o_head = tl.arange(0, HV_BLOCK)
    m_head = o_head < tl.where(block == 0, HV, 0)
    for place in range(tl.load(p_ring_rows + segment).to(tl.int32)):
        n = left + place
        b_row = tl.load(p_proj + n * stride_proj + o_column, mask=m_ring, other=0.0)
        p_place = p_ring + slot * stride_ring_slot + place * stride_ring_row
        tl.store(p_place + o_column, b_row.to(p_ring.dtype.element_ty), mask=m_ring)
        p_kept = p_ring_gates + slot * stride_gates_slot + place * stride_gates_row
        for part in tl.static_range(2):
            b_gate = tl.load(p_gates + (n * 2 + part) * HV + o_head, mask=m_head, other=0.0)
            tl.store(p_kept + part * HV + o_head, b_gate, mask=m_head)


@triton.jit(
    do_not_specialize=["rows", "segments", "norm_programs"],
    do_not_specialize_on_alignment=INDEX_POINTERS,
)
def _finish(
    p_out: tl.tensor,
    p_proj: tl.tensor,
    p_v: tl.tensor,
    p_gates: tl.tensor,
    p_norm: tl.tensor,
    p_ring: tl.tensor,
    p_ring_gates: tl.tensor,
    p_conv: tl.tensor,
    p_snapshot_conv: tl.tensor,
    p_row_segment: tl.tensor,
    p_row_start: tl.tensor,
    p_starts: tl.tensor,
    p_slots: tl.tensor,
    p_committed: tl.tensor,
    p_pending: tl.tensor,
    p_ring_first: tl.tensor,
    p_ring_rows: tl.tensor,
    p_snapshots: tl.tensor,
    rows: tl.tensor,
    segments: tl.tensor,
    norm_programs: tl.tensor,
    stride_proj: tl.tensor,
    stride_ring_slot: tl.tensor,
    stride_ring_row: tl.tensor,
    stride_gates_slot: tl.tensor,
    stride_gates_row: tl.tensor,
    stride_conv_slot: tl.tensor,
    stride_snapshot_slot: tl.tensor,
    stride_snapshot_row: tl.tensor,
    eps: tl.tensor,
    CONV_DIM: tl.constexpr,
    RING_WIDTH: tl.constexpr,
    HV: tl.constexpr,
    HV_BLOCK: tl.constexpr,
    DV: tl.constexpr,
    TAPS: tl.constexpr,
    TAPS_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Norm programs first, then the programs of states: one launch, since both are small."""
    program = tl.program_id(0)
    if program < norm_programs:
        _gated_norm(
            p_out,
            p_v,
            p_proj,
            p_norm,
            p_row_segment,
            p_row_start,
            program // HV,
            program % HV,
            rows,
            segments,
            stride_proj,
            eps,
            CONV_DIM,
            HV,
            DV,
            ROWS,
        )
    else:
        item = program - norm_programs
        _keep(
            p_proj,
            p_gates,
            p_ring,
            p_ring_gates,
            p_conv,
            p_snapshot_conv,
            p_row_start,
            p_starts,
            p_slots,
            p_committed,
            p_pending,
            p_ring_first,
            p_ring_rows,
            p_snapshots,
            (item // BLOCKS).to(tl.int64),
            item % BLOCKS,
            stride_proj,
            stride_ring_slot,
            stride_ring_row,
            stride_gates_slot,
            stride_gates_row,
            stride_conv_slot,
            stride_snapshot_slot,
            stride_snapshot_row,
            CONV_DIM,
            RING_WIDTH,
            HV,
            HV_BLOCK,
            TAPS,
            TAPS_BLOCK,
            CHANNELS,
        )


def finish(
    proj: Tensor, inputs: GdnInputs, params: GdnParams, state: GdnState, batch: RaggedBatch
) -> Tensor:
    """Gate and normalise the outputs in inputs.v -> [R, value_dim] in the dtype of proj.

    Updates state.conv, state.snapshot_conv and the ring as the batch asks.
    """
    rows, segments = inputs.rows, batch.slots.shape[0]
    hv, dv, taps = params.value_heads, params.value_width, params.conv.shape[0]
    ring_width = state.ring_inputs.shape[2]
    blocks = triton.cdiv(max(params.conv_dim, ring_width), CHANNELS)
    norm_programs = triton.cdiv(rows, ROWS_PER_PROGRAM) * hv
    out = torch.empty(rows, params.value_dim, dtype=proj.dtype, device=proj.device)
    _finish[(norm_programs + segments * blocks,)](
        out,
        proj,
        inputs.v,
        inputs.gates,
        params.norm,
        state.ring_inputs,
        state.ring_gates,
        state.conv,
        state.snapshot_conv,
        batch.row_segment,
        batch.row_start,
        batch.starts,
        batch.slots,
        batch.committed,
        batch.pending,
        batch.ring_first,
        batch.ring_rows,
        batch.snapshots,
        rows,
        segments,
        norm_programs,
        proj.stride(0),
        state.ring_inputs.stride(0),
        state.ring_inputs.stride(1),
        state.ring_gates.stride(0),
        state.ring_gates.stride(1),
        state.conv.stride(0),
        state.snapshot_conv.stride(0),
        state.snapshot_conv.stride(1),
        params.eps,
        CONV_DIM=params.conv_dim,
        RING_WIDTH=ring_width,
        HV=hv,
        HV_BLOCK=triton.next_power_of_2(hv),
        DV=dv,
        TAPS=taps,
        TAPS_BLOCK=triton.next_power_of_2(taps),
        ROWS=ROWS_PER_PROGRAM,
        CHANNELS=CHANNELS,
        BLOCKS=blocks,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out
