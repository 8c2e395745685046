"""The recurrence of prompts in chunks of 64 tokens: all chunks at once inside, one by one across.

Knows ragged rows and slots. Formulas: naive.chunked_rows. A sequence is cut from its own first row,
so a prompt that is split on the 64 grid runs the same chunks and gives the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.batch import RaggedBatch
from kernels.gdn.naive import CHUNK
from kernels.gdn.triton_inputs import INDEX_POINTERS, GdnInputs
from kernels.gdn.triton_step import runs_chunked, settled
from kernels.gdn.types import GdnState

# Elements of a state that one program carries across chunks: 32 registers a thread in 4 warps.
TILE = 4096
# Columns of q, k and v that are multiplied at a time inside a chunk.
BLOCK = 64


def chunk_columns(dk: int, dv: int) -> int:
    """Columns of the state that one program carries; tl.dot takes no fewer than 16."""
    return min(dv, max(16, TILE // dk))


def chunk_places(rows: int, segments: int) -> int:
    """An upper bound of the chunks of all sequences, from what the host knows.

    Sequence s keeps its chunks from place row_start[s] // 64 + s on: never fewer places than
    chunks, whatever the lengths are.
    """
    return rows // CHUNK + segments


@triton.jit
def _owner(
    p_row_start: tl.tensor,
    place: tl.tensor,
    segments: tl.tensor,
    halvings: tl.tensor,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """The sequence that a chunk's place belongs to: the last whose first place is not behind it."""
    low = place * 0
    high = low + segments - 1
    for _ in range(halvings):
        middle = (low + high + 1) // 2
        behind = tl.load(p_row_start + middle) // CHUNK + middle > place
        low = tl.where(behind, low, middle)
        high = tl.where(behind, middle - 1, high)
    return low


@triton.jit
def _operand(b_x: tl.tensor, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr) -> tl.tensor:
    """b_x as an operand of a product; the interpreter cuts bits off where a GPU rounds."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        bits = b_x.to(tl.uint32, bitcast=True)
        b_x = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return b_x.to(DTYPE)


@triton.jit
def _product(b_left: tl.tensor, b_right: tl.tensor, INTERPRETED: tl.constexpr) -> tl.tensor:
    """Float32 sums of products; float32 operands in three passes of the tensor cores.

    The interpreter multiplies bfloat16 as integers; interpreteded it gets what tensor cores get.
    """
    if INTERPRETED:
        return tl.dot(b_left.to(tl.float32), b_right.to(tl.float32), input_precision="tf32x3")
    return tl.dot(b_left, b_right, input_precision="tf32x3")


@triton.jit
def _joined(b_x: tl.tensor, b_a: tl.tensor, SIZE: tl.constexpr, CHUNK: tl.constexpr) -> tl.tensor:
    """From the inverses of the diagonal blocks of SIZE rows to those of 2 SIZE rows."""
    o_i = tl.arange(0, CHUNK)
    b_row, b_column = o_i[:, None] // SIZE, o_i[None, :] // SIZE
    b_below = tl.where((b_row // 2 == b_column // 2) & (b_row > b_column), b_a, 0.0)
    b_product = tl.dot(b_x, b_below, input_precision="tf32x3")
    return b_x - tl.dot(b_product, b_x, input_precision="tf32x3")


@triton.jit
def _inverse(b_a: tl.tensor, CHUNK: tl.constexpr) -> tl.tensor:
    """(I + A)^-1 of a strictly lower A [64, 64].

    Blocks of 8 by the finite series (I - A)(I + A^2)(I + A^4), whose terms stay below 35 even
    where all keys are equal (over 64 rows they would reach 1e17 and cancel); then pairs of blocks
    are joined by [[P, 0], [O, Q]]^-1 = [[P^-1, 0], [-Q^-1 O P^-1, Q^-1]]. In full float32 always:
    errors here reach every later chunk.
    """
    o_i = tl.arange(0, CHUNK)
    b_row, b_column = o_i[:, None], o_i[None, :]
    b_power = tl.where(b_row // 8 == b_column // 8, b_a, 0.0)
    b_x = tl.where(b_row == b_column, 1.0, 0.0) - b_power
    for _ in tl.static_range(2):
        b_power = tl.dot(b_power, b_power, input_precision="tf32x3")
        b_x += tl.dot(b_x, b_power, input_precision="tf32x3")
    b_x = _joined(b_x, b_a, 8, CHUNK)
    b_x = _joined(b_x, b_a, 16, CHUNK)
    return _joined(b_x, b_a, 32, CHUNK)


@triton.jit(
    do_not_specialize=["segments", "halvings"], do_not_specialize_on_alignment=INDEX_POINTERS
)
def _inside(
    p_q: tl.tensor,
    p_k: tl.tensor,
    p_v: tl.tensor,
    p_gates: tl.tensor,
    p_query: tl.tensor,
    p_key: tl.tensor,
    p_w: tl.tensor,
    p_within: tl.tensor,
    p_decay: tl.tensor,
    p_row_start: tl.tensor,
    p_committed: tl.tensor,
    p_pending: tl.tensor,
    p_snapshots: tl.tensor,
    p_chunked: tl.tensor,
    segments: tl.tensor,
    halvings: tl.tensor,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    CHUNK: tl.constexpr,
    COPY: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """One program per (chunk, value head): U over v, W, lower(q k^T D) and the sums of g."""
    place = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    segment = _owner(p_row_start, place, segments, halvings, CHUNK)
    first = tl.load(p_row_start + segment)
    own = tl.load(p_row_start + segment + 1) - first
    start = (place - (first // CHUNK + segment)) * CHUNK
    pending = tl.load(p_pending + segment)
    tail = own - tl.load(p_committed + segment)
    chunked = runs_chunked(p_chunked, p_snapshots, segment, pending, tail)
    if (start >= own) | (chunked == 0):
        return

    o_i = tl.arange(0, CHUNK)
    o_n = first + start + o_i
    m_n = start + o_i < own
    # Rows behind the end neither decay nor write: g and beta 0.
    p_gate = p_gates + o_n * (2 * HV) + head
    b_sum = tl.cumsum(tl.load(p_gate, mask=m_n, other=0.0), 0)
    b_beta = tl.load(p_gate + HV, mask=m_n, other=0.0)
    tl.store(p_decay + o_n * HV + head, b_sum, mask=m_n)
    m_lower = o_i[:, None] >= o_i[None, :]
    # Masked before exp: above the diagonal the difference is positive and may overflow.
    b_between = tl.exp(tl.where(m_lower, b_sum[:, None] - b_sum[None, :], 0.0))
    b_between = tl.where(m_lower, b_between, 0.0)

    # The type of the products' operands: that of what they leave behind.
    OPERAND: tl.constexpr = p_w.dtype.element_ty
    o_key = (o_n * HK + head // (HV // HK)) * DK
    b_kk = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    b_qk = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    for block in tl.static_range(DK // BK):
        o_k = block * BK + tl.arange(0, BK)
        m_k = m_n[:, None] & (o_k < DK)[None, :]
        b_k = tl.load(p_k + o_key[:, None] + o_k[None, :], mask=m_k, other=0.0)
        b_q = tl.load(p_q + o_key[:, None] + o_k[None, :], mask=m_k, other=0.0)
        # Read transposed rather than turned in registers, which Triton 3.4 to 3.7.0 gets wrong
        # for some products on Hopper.
        m_kt = (o_k < DK)[:, None] & m_n[None, :]
        b_kt = tl.load(p_k + o_key[None, :] + o_k[:, None], mask=m_kt, other=0.0)
        b_key = _operand(b_k, OPERAND, INTERPRETED)
        b_query = _operand(b_q, OPERAND, INTERPRETED)
        b_kk += _product(b_key, _operand(b_kt, OPERAND, INTERPRETED), INTERPRETED)
        b_qk += _product(b_query, _operand(b_kt, OPERAND, INTERPRETED), INTERPRETED)
        if COPY and head % (HV // HK) == 0:
            tl.store(p_query + o_key[:, None] + o_k[None, :], b_query, mask=m_k)
            tl.store(p_key + o_key[:, None] + o_k[None, :], b_key, mask=m_k)
    p_row = p_within + (o_n * HV + head)[:, None] * CHUNK + o_i[None, :]
    tl.store(
        p_row,
        _operand(b_qk * b_between, OPERAND, INTERPRETED),
        mask=m_n[:, None] & (o_i < CHUNK)[None, :],
    )
    m_strict = o_i[:, None] > o_i[None, :]
    b_a = tl.where(m_strict, b_kk * b_between * b_beta[:, None], 0.0)
    b_inverse = _operand(_inverse(b_a, CHUNK), OPERAND, INTERPRETED)

    b_scale = b_beta * tl.exp(b_sum)
    for block in tl.static_range(DK // BK):
        o_k = block * BK + tl.arange(0, BK)
        m_k = m_n[:, None] & (o_k < DK)[None, :]
        b_k = tl.load(p_k + o_key[:, None] + o_k[None, :], mask=m_k, other=0.0)
        b_w = _product(
            b_inverse, _operand(b_k * b_scale[:, None], OPERAND, INTERPRETED), INTERPRETED
        )
        p_out = p_w + (o_n * HV + head)[:, None] * DK + o_k[None, :]
        tl.store(p_out, _operand(b_w, OPERAND, INTERPRETED), mask=m_k)
    for block in tl.static_range(DV // BV):
        o_v = block * BV + tl.arange(0, BV)
        m_v = m_n[:, None] & (o_v < DV)[None, :]
        p_value = p_v + (o_n * HV + head)[:, None] * DV + o_v[None, :]
        b_v = tl.load(p_value, mask=m_v, other=0.0)
        b_u = _product(
            b_inverse, _operand(b_v * b_beta[:, None], OPERAND, INTERPRETED), INTERPRETED
        )
        # In place: U needs v of all lanes, so none is overwritten before every lane has read it.
        tl.store(p_value, b_u, mask=m_v)


@triton.jit(do_not_specialize=["saves"], do_not_specialize_on_alignment=INDEX_POINTERS)
def _across(
    p_q: tl.tensor,
    p_k: tl.tensor,
    p_v: tl.tensor,
    p_w: tl.tensor,
    p_within: tl.tensor,
    p_decay: tl.tensor,
    p_h: tl.tensor,
    p_states: tl.tensor,
    p_row_start: tl.tensor,
    p_starts: tl.tensor,
    p_slots: tl.tensor,
    p_committed: tl.tensor,
    p_pending: tl.tensor,
    p_snapshots: tl.tensor,
    p_chunked: tl.tensor,
    p_saves: tl.tensor,
    p_saved: tl.tensor,
    stride_h_slot: tl.tensor,
    stride_saved: tl.tensor,
    saves: tl.tensor,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BV: tl.constexpr,
    CHUNK: tl.constexpr,
    STATES: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """One program per (BV columns, value head, sequence); the state stays in registers."""
    head = tl.program_id(1)
    segment = tl.program_id(2).to(tl.int64)
    first = tl.load(p_row_start + segment)
    own = tl.load(p_row_start + segment + 1) - first
    pending = tl.load(p_pending + segment)
    tail = own - tl.load(p_committed + segment)
    chunked = runs_chunked(p_chunked, p_snapshots, segment, pending, tail)
    if (own == 0) | (chunked == 0):
        return

    OPERAND: tl.constexpr = p_w.dtype.element_ty
    o_i = tl.arange(0, CHUNK)
    o_k = tl.arange(0, DK)
    o_v = tl.program_id(0) * BV + tl.arange(0, BV)
    o_state = head * (DK * DV) + o_k[:, None] * DV + o_v[None, :]
    m_state = (o_k < DK)[:, None] & (o_v < DV)[None, :]
    p_state = p_h + tl.load(p_slots + segment) * stride_h_slot + o_state
    b_start = tl.zeros([DK], dtype=tl.int64) + tl.load(p_starts + segment)
    m_stored = (b_start != 0)[:, None] & (o_v < DV)[None, :]
    b_h = tl.load(p_state, mask=m_stored, other=0.0).to(tl.float32)
    for chunk in range(((own + CHUNK - 1) // CHUNK).to(tl.int32)):
        start = first + chunk * CHUNK
        o_n = start + o_i
        m_n = o_n < first + own
        o_key = (o_n * HK + head // (HV // HK)) * DK
        o_head = o_n * HV + head
        m_rows = m_n[:, None] & (o_k < DK)[None, :]
        b_sum = tl.load(p_decay + o_head, mask=m_n, other=0.0)
        last = tl.minimum(start + CHUNK, first + own) - 1
        b_end = tl.load(p_decay + last * HV + head)
        b_w = tl.load(p_w + o_head[:, None] * DK + o_k[None, :], mask=m_rows, other=0.0)
        m_v = m_n[:, None] & (o_v < DV)[None, :]
        p_value = p_v + o_head[:, None] * DV + o_v[None, :]
        b_u = tl.load(p_value, mask=m_v, other=0.0)
        b_state = _operand(b_h, OPERAND, INTERPRETED)
        b_new = b_u - _product(b_w, b_state, INTERPRETED)
        b_q = tl.load(p_q + o_key[:, None] + o_k[None, :], mask=m_rows, other=0.0)
        b_out = _product(b_q, b_state, INTERPRETED) * tl.exp(b_sum)[:, None]
        m_within = m_n[:, None] & (o_i < CHUNK)[None, :]
        b_within = tl.load(
            p_within + o_head[:, None] * CHUNK + o_i[None, :], mask=m_within, other=0.0
        )
        b_out += _product(b_within, _operand(b_new, OPERAND, INTERPRETED), INTERPRETED)
        m_kt = (o_k < DK)[:, None] & m_n[None, :]
        b_kt = tl.load(p_k + o_key[None, :] + o_k[:, None], mask=m_kt, other=0.0)
        b_shrunk = _operand(b_new * tl.exp(b_end - b_sum)[:, None], OPERAND, INTERPRETED)
        b_h = b_h * tl.exp(b_end) + _product(b_kt, b_shrunk, INTERPRETED)
        b_h = settled(b_h, p_h.dtype.element_ty)
        # In place of U: the outputs need U of all lanes.
        tl.store(p_value, b_out, mask=m_v)
        if STATES:
            place = first // CHUNK + segment + chunk
            tl.store(p_states + place * (HV * DK * DV) + o_state, b_h, mask=m_state)
        for save in range(saves):
            owner = tl.load(p_saves + 3 * save)
            after = tl.load(p_saves + 3 * save + 1)
            if (owner == segment) & (after == (chunk + 1) * CHUNK):
                place = tl.load(p_saves + 3 * save + 2)
                b_saved = b_h.to(p_saved.dtype.element_ty)
                tl.store(p_saved + place * stride_saved + o_state, b_saved, mask=m_state)
    tl.store(p_state, b_h.to(p_h.dtype.element_ty), mask=m_state)


def chunked_prefill(
    inputs: GdnInputs,
    state: GdnState,
    batch: RaggedBatch,
    *,
    operand: torch.dtype,
    states: Tensor | None = None,
) -> None:
    """Run every sequence that takes the chunked form; the others are left alone.

    Updates state.h and what `batch.saves` sets aside of it; leaves the outputs in inputs.v.

    Args:
        inputs: of all rows.
        state: of the layer.
        batch: the step's rows.
        operand: of the products: bfloat16, or float32 on tensor cores in three passes, which
            is exact to 1e-6. Sums, decays, the inverse and the state are float32 either way.
        states: [chunk_places, Hv, Dk, Dv] float32, or None; takes the state after every chunk of
            sequence s from place row_start[s] // 64 + s on.
    """
    rows, segments = inputs.rows, batch.slots.shape[0]
    hk, (hv, dk, dv) = inputs.q.shape[1], state.h.shape[1:]
    places = chunk_places(rows, segments)

    def scratch(*shape: int, dtype: torch.dtype = operand) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=inputs.q.device)

    w, within = scratch(rows, hv, dk), scratch(rows, hv, CHUNK)
    decay = scratch(rows, hv, dtype=torch.float32)
    interpreted = bool(triton.knobs.runtime.interpret)
    copy = operand != torch.float32
    q, k = (scratch(rows, hk, dk), scratch(rows, hk, dk)) if copy else (inputs.q, inputs.k)
    _inside[(places, hv)](
        inputs.q,
        inputs.k,
        inputs.v,
        inputs.gates,
        q,
        k,
        w,
        within,
        decay,
        batch.row_start,
        batch.committed,
        batch.pending,
        batch.snapshots,
        batch.chunked,
        segments,
        segments.bit_length(),
        HK=hk,
        HV=hv,
        DK=dk,
        DV=dv,
        BK=min(dk, BLOCK),
        BV=min(dv, BLOCK),
        CHUNK=CHUNK,
        COPY=copy,
        INTERPRETED=interpreted,
        num_warps=4,
        enable_fp_fusion=True,
    )
    columns = chunk_columns(dk, dv)
    saved = state.h if state.saved_h is None else state.saved_h
    _across[(dv // columns, hv, segments)](
        q,
        k,
        inputs.v,
        w,
        within,
        decay,
        state.h,
        state.h if states is None else states,
        batch.row_start,
        batch.starts,
        batch.slots,
        batch.committed,
        batch.pending,
        batch.snapshots,
        batch.chunked,
        batch.row_start if batch.saves is None else batch.saves,
        saved,
        state.h.stride(0),
        saved.stride(0),
        0 if batch.saves is None else len(batch.saves),
        HK=hk,
        HV=hv,
        DK=dk,
        DV=dv,
        BV=columns,
        CHUNK=CHUNK,
        STATES=states is not None,
        INTERPRETED=interpreted,
        num_warps=4,
        num_stages=1,
        enable_fp_fusion=True,
    )
