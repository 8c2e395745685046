"""The recurrence row by row: pending rows, committed rows, then rows that may be rejected.

Knows slots, rings and snapshots by place, not what the rows mean. One compiled body serves plain,
carry, replay and snapshot steps of any number of rows, so that their bits agree.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.batch import RaggedBatch
from kernels.gdn.triton_inputs import INDEX_POINTERS, GdnInputs
from kernels.gdn.types import GdnState

# Elements of a state that one warp holds: 64 registers a thread. One warp, so that no sum over Dk
# crosses a barrier: a row costs about 400 issue slots, and on paper the rows of a verify stay
# below the time that the state takes to move.
TILE = 2048
# Compiled for sm_90 at 128 x 128 the kernel takes 215 registers when left alone, 179 under this
# bound (168 spills): 11 warps on an SM with 8 KiB of reads in flight each, three times what hides
# the latency of 4.3 TB/s.
REGISTERS = 184


def step_columns(dk: int, dv: int) -> int:
    """Columns of the state that one program owns, by geometry alone: the same for every K."""
    return max(1, min(dv, TILE // dk))


@triton.jit
def runs_chunked(
    p_chunked: tl.tensor,
    p_snapshots: tl.tensor,
    segment: tl.tensor,
    pending: tl.tensor,
    tail: tl.tensor,
) -> tl.tensor:
    """Whether a sequence takes the chunked form; tail counts its rows that are not committed."""
    allowed = tl.load(p_chunked + segment) != 0
    plain = tl.load(p_snapshots + segment) < 0
    return allowed & plain & (pending == 0) & (tail == 0)


@triton.jit
def settled(b_h: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """A state as its pool holds it: rounded to float16 where that is its type.

    At most the largest float16; what is not finite becomes a NaN, since x - x is 0 for all else.
    """
    if tl.float16 == DTYPE:
        b_half = tl.minimum(tl.maximum(b_h, -65504.0), 65504.0).to(tl.float16)
        b_h = b_half.to(tl.float32) + (b_h - b_h)
    return b_h


@triton.jit
def _place(i: tl.tensor, pending: tl.tensor, ring: tl.tensor, first: tl.tensor) -> tl.tensor:
    """Where row i of a sequence lies, counted from its first pending row."""
    return tl.where(i < pending, ring + i, first + i - pending)


@triton.jit
def _row(
    p_q: tl.tensor,
    p_k: tl.tensor,
    p_v: tl.tensor,
    p_gates: tl.tensor,
    n: tl.tensor,
    head: tl.tensor,
    o_k: tl.tensor,
    o_v: tl.tensor,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
) -> tl.tensor:
    """q, k, v, g and beta of one row."""
    o_qk = (n * HK + head // (HV // HK)) * DK + o_k
    p_gate = p_gates + n * (2 * HV) + head
    b_v = tl.load(p_v + (n * HV + head) * DV + o_v)
    return tl.load(p_q + o_qk), tl.load(p_k + o_qk), b_v, tl.load(p_gate), tl.load(p_gate + HV)


@triton.jit(
    do_not_specialize=["rows", "ring", "prefills"], do_not_specialize_on_alignment=INDEX_POINTERS
)
def _step(
    p_q: tl.tensor,
    p_k: tl.tensor,
    p_v: tl.tensor,
    p_gates: tl.tensor,
    p_h: tl.tensor,
    p_snapshot_h: tl.tensor,
    p_row_start: tl.tensor,
    p_starts: tl.tensor,
    p_slots: tl.tensor,
    p_committed: tl.tensor,
    p_pending: tl.tensor,
    p_snapshots: tl.tensor,
    p_chunked: tl.tensor,
    rows: tl.tensor,
    ring: tl.tensor,
    prefills: tl.tensor,
    stride_h_slot: tl.tensor,
    stride_snapshot: tl.tensor,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BV: tl.constexpr,
) -> None:
    """One program per (BV columns, value head, sequence); the state is read and written once."""
    head = tl.program_id(1)
    segment = tl.program_id(2).to(tl.int64)
    first = tl.load(p_row_start + segment)
    own = tl.load(p_row_start + segment + 1) - first
    pending = tl.load(p_pending + segment)
    committed = tl.load(p_committed + segment)
    chunked = runs_chunked(p_chunked, p_snapshots, segment, pending, own - committed)
    # An empty sequence has nothing to run: it pads a captured batch.
    if ((prefills != 0) & chunked) | (pending + own == 0):
        return
    slot = tl.load(p_slots + segment)
    b_start = tl.zeros([DK], dtype=tl.int64) + tl.load(p_starts + segment)
    snapshot = tl.load(p_snapshots + segment)
    kept = pending + committed

    o_k = tl.arange(0, DK)
    o_v = tl.program_id(0) * BV + tl.arange(0, BV)
    o_state = head * (DK * DV) + o_k[:, None] * DV + o_v[None, :]
    p_state = p_h + slot * stride_h_slot + o_state
    m_state = (o_k < DK)[:, None] & (o_v < DV)[None, :]
    # What a fresh sequence finds belongs to an earlier one and may be NaN: masked, not multiplied.
    m_stored = (b_start != 0)[:, None] & (o_v < DV)[None, :]
    b_h = tl.load(p_state, mask=m_stored, other=0.0).to(tl.float32)
    if kept == 0:
        tl.store(p_state, b_h.to(p_h.dtype.element_ty), mask=m_state)
    total = (pending + own).to(tl.int32)
    # A row's inputs are read while the row before runs: the rows of a verify wait for the memory
    # once, not once each.
    n = _place(0, pending, rows + segment * ring, first)
    b_q, b_k, b_v, b_g, b_beta = _row(p_q, p_k, p_v, p_gates, n, head, o_k, o_v, HK, HV, DK, DV)
    for i in range(total):
        # A run-time loop: one body, so the same contractions for every row of every mode.
        after = _place(tl.minimum(i + 1, total - 1), pending, rows + segment * ring, first)
        b_q1, b_k1, b_v1, b_g1, b_beta1 = _row(
            p_q, p_k, p_v, p_gates, after, head, o_k, o_v, HK, HV, DK, DV
        )
        b_h = b_h * tl.exp(b_g)
        b_read = tl.sum(b_h * b_k[:, None], 0)
        b_u = b_beta * (b_v - b_read)
        b_h = b_h + b_k[:, None] * b_u[None, :]
        b_out = tl.sum(b_h * b_q[:, None], 0)
        if i >= pending:
            tl.store(p_v + (n * HV + head) * DV + o_v, b_out)
        # Behind every row, whether it is stored or not: so that the pool's type splits no bits.
        b_h = settled(b_h, p_h.dtype.element_ty)
        if i == kept - 1:
            tl.store(p_state, b_h.to(p_h.dtype.element_ty), mask=m_state)
        t = i - pending
        if (snapshot >= 0) & (t >= 0) & (t < own - 1):
            p_after = p_snapshot_h + (snapshot + t) * stride_snapshot + o_state
            tl.store(p_after, b_h.to(p_snapshot_h.dtype.element_ty), mask=m_state)
        n, b_q, b_k, b_v, b_g, b_beta = after, b_q1, b_k1, b_v1, b_g1, b_beta1


def recurrent_step(inputs: GdnInputs, state: GdnState, batch: RaggedBatch) -> None:
    """Run the rows of every sequence that does not take the chunked form.

    Updates state.h and state.snapshot_h and leaves the outputs in inputs.v. The columns of a row
    of v are read and written by the same program, after every lane has read them.
    """
    segments = batch.slots.shape[0]
    hk, (hv, dk, dv) = inputs.q.shape[1], state.h.shape[1:]
    columns = step_columns(dk, dv)
    _step[(dv // columns, hv, segments)](
        inputs.q,
        inputs.k,
        inputs.v,
        inputs.gates,
        state.h,
        state.snapshot_h,
        batch.row_start,
        batch.starts,
        batch.slots,
        batch.committed,
        batch.pending,
        batch.snapshots,
        batch.chunked,
        inputs.rows,
        inputs.ring,
        int(batch.prefills),
        state.h.stride(0),
        state.snapshot_h.stride(0),
        HK=hk,
        HV=hv,
        DK=dk,
        DV=dv,
        BV=columns,
        num_warps=1,
        maxnreg=REGISTERS,
        enable_fp_fusion=True,
    )
