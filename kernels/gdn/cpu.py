"""The GDN mixer in one numba loop nest: a state is read and written once per row, not twice.

Each sequence runs its rows one after another from the convolution to the gated norm, so a row's
bits depend neither on its neighbours nor on where a prompt was split. The chunked form is not used
on a CPU: it saves nothing there (docs/decisions.md).
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from numba import prange
from torch import Tensor

from kernels.batch import RaggedBatch
from kernels.gdn.half import half_bits, nearest_half
from kernels.gdn.naive import CHUNK
from kernels.gdn.rows import (
    clear,
    convolve,
    correct,
    gated_norm,
    normalise,
    padded,
    read_history,
    silu,
    sweep,
    write_history,
)
from kernels.gdn.types import GdnParams, GdnState
from kernels.jit import exp32, host, inner, parallel_kernel, sigmoid32
from kernels.lanes import copy

# Rows whose inputs are made before a state is touched: three pending ones and four of a verify.
_ROWS = 8
_NO_SAVES = np.zeros((0, 3), np.int64)


@inner
def _softplus(x: Any) -> Any:
    return x if x > np.float32(20.0) else np.log1p(np.exp(x))


@inner
def _round_to_half(state: Any, at: Any, count: Any) -> None:
    """state[at:][:count]: every number becomes the nearest that float16 holds."""
    part = state[at : at + count]
    for i in range(count):
        part[i] = nearest_half(part[i])


@inner
def _keep_half(state: Any, at: Any, stride: Any, out: Any) -> None:
    """out [Dk, Dv] uint16 = the float16 bits of a state [Dk, stride] that float16 holds."""
    dk, dv = out.shape
    for i in range(dk):
        row = state[at + i * stride : at + i * stride + dv]
        for j in range(dv):
            out[i, j] = half_bits(row[j])


@inner
def _keep(state: Any, at: Any, stride: Any, out: Any, out_at: Any, dk: Any, dv: Any) -> None:
    """out[out_at:] [Dk, Dv] = a state [Dk, stride]."""
    for i in range(dk):
        copy(state, at + i * stride, out, out_at + i * dv, dv)


@inner
def _mix_items(
    begin_item: Any,
    end_item: Any,
    proj: Any,
    conv_weight: Any,
    head_decay: Any,
    dt_bias: Any,
    norm: Any,
    eps: Any,
    key_heads: Any,
    dk: Any,
    row_start: Any,
    starts: Any,
    slots: Any,
    committed: Any,
    pending: Any,
    ring_first: Any,
    ring_rows: Any,
    snapshots: Any,
    chunked: Any,
    h: Any,
    conv: Any,
    ring_inputs: Any,
    ring_gates: Any,
    snapshot_h: Any,
    snapshot_conv: Any,
    saves: Any,
    saved_h: Any,
    out: Any,
) -> None:
    """Items are (key head, sequence): a key head's queries and keys with all its value heads."""
    value_heads, dv = head_decay.shape[0], norm.shape[0]
    taps, conv_dim = conv_weight.shape
    ratio = value_heads // key_heads
    gate_column = conv_dim + value_heads * dv
    columns = proj.shape[1]
    drafts, ring_columns = ring_inputs.shape[1], ring_inputs.shape[2]
    shown_rows = snapshot_conv.shape[1]
    segments = slots.shape[0]
    key_width, stride = padded(dk), padded(dv)
    width = 2 * key_width + ratio * stride
    size = dk * stride
    parts = 2 + ratio

    # What pads a row stays zero.
    weights = np.zeros(taps * width, np.float32)
    scale = np.zeros(stride, np.float32)
    copy(norm, 0, scale, 0, dv)
    window = np.zeros((taps + _ROWS) * width, np.float32)
    # Rows of q, k and v behind the convolution, then every head's gates z, row by row.
    mixed = np.zeros(_ROWS * (width + ratio * stride), np.float32)
    read = np.empty(_ROWS * stride, np.float32)
    key_read = np.empty(stride, np.float32)
    decays = np.empty(_ROWS, np.float32)
    betas = np.empty(_ROWS, np.float32)
    # States of rows that may be rejected, and one of rows that are padded.
    trials = np.empty(ratio * size, np.float32)
    spread = np.zeros(0 if stride == dv else size, np.float32)
    # Of q, k and each head's v: first column of the projection, place in a row of the window.
    part_column = np.empty(parts, np.int64)
    part_place = np.empty(parts, np.int64)
    part_count = np.empty(parts, np.int64)
    group = -1
    for item in range(begin_item, end_item):
        s = item % segments
        slot = slots[s]
        fresh = starts[s] == 0
        before = pending[s]
        first = row_start[s]
        own = row_start[s + 1] - first
        kept = committed[s]
        if group != item // segments:
            group = item // segments
            for part in range(parts):
                part_column[part] = part * key_heads * dk + group * dk
                part_place[part] = part * key_width
                part_count[part] = dk
                if part >= 2:
                    part_column[part] = 2 * key_heads * dk + (group * ratio + part - 2) * dv
                    part_place[part] = 2 * key_width + (part - 2) * stride
                    part_count[part] = dv
                for tap in range(taps):
                    source = tap * conv_dim + part_column[part]
                    copy(
                        conv_weight,
                        source,
                        weights,
                        tap * width + part_place[part],
                        part_count[part],
                    )
        if before + own == 0:
            continue
        if fresh:
            clear(window, 0, taps * width)
        else:
            for part in range(parts):
                source = (slot * conv_dim + part_column[part]) * taps
                read_history(conv, source, taps, window, part_place[part], width, part_count[part])

        for begin in range(-before, own, _ROWS):
            rows = min(_ROWS, own - begin)
            for row in range(rows):
                t = begin + row
                place = t - ring_first[s]
                left = t >= 0 and 0 <= place < ring_rows[s]
                for part in range(parts):
                    column, count = part_column[part], part_count[part]
                    target = (taps + row) * width + part_place[part]
                    if t < 0:
                        source = (slot * drafts + before + t) * ring_columns + column
                        copy(ring_inputs, source, window, target, count)
                    else:
                        copy(proj, (first + t) * columns + column, window, target, count)
                    if left:
                        # Pending rows, which lie in the same places, are in the window by now.
                        source = (slot * drafts + place) * ring_columns + column
                        copy(window, target, ring_inputs, source, count)
                if left and group == 0:
                    source = (first + t) * columns + conv_dim
                    target = (slot * drafts + place) * ring_columns + conv_dim
                    copy(proj, source, ring_inputs, target, ring_columns - conv_dim)

            convolve(window, weights, taps, width, rows, mixed)
            gates = rows * width
            asked = max(-begin, 0)
            for row in range(asked, rows):
                for place in range(ratio):
                    source = (first + begin + row) * columns + conv_dim
                    target = gates + ((row - asked) * ratio + place) * stride
                    copy(proj, source + (group * ratio + place) * dv, mixed, target, dv)
            silu(mixed, gates + (rows - asked) * ratio * stride)
            for row in range(rows):
                for part in range(2):
                    divisor = np.sqrt(np.float32(dk)) if part == 0 else np.float32(1.0)
                    normalise(mixed, row * width + part * key_width, key_width, divisor)

            for place in range(ratio):
                head = group * ratio + place
                for row in range(rows):
                    t = begin + row
                    if t < 0:
                        g = ring_gates[slot, before + t, 0, head]
                        beta = ring_gates[slot, before + t, 1, head]
                    else:
                        beta = sigmoid32(proj[first + t, gate_column + head])
                        raw = proj[first + t, gate_column + value_heads + head] + dt_bias[head]
                        g = head_decay[head] * _softplus(raw)
                        if 0 <= t - ring_first[s] < ring_rows[s]:
                            ring_gates[slot, t - ring_first[s], 0, head] = g
                            ring_gates[slot, t - ring_first[s], 1, head] = beta
                    decays[row] = exp32(g)
                    betas[row] = beta

                stored = (slot * value_heads + head) * dk * dv
                state, state_at = h, stored
                if stride != dv:
                    state, state_at = spread, 0
                    for i in range(dk):
                        copy(h, stored + i * dv, spread, i * stride, dv)
                if fresh and begin == 0:
                    clear(state, state_at, size)
                if begin > kept:
                    state, state_at = trials, place * size
                begun = False
                for row in range(rows):
                    t = begin + row
                    query_at = row * width
                    key_at = query_at + key_width
                    add_at = key_at + key_width + place * stride
                    if not begun:
                        source, source_at = state, state_at
                        if t == kept:
                            # Rows from here on may be rejected: they run on a copy.
                            state, state_at = trials, place * size
                        sweep(
                            source,
                            source_at,
                            state,
                            state_at,
                            dk,
                            stride,
                            mixed,
                            key_at,
                            None,
                            None,
                            read,
                            0,
                            decays[row],
                            key_at,
                            key_read,
                        )
                    correct(mixed, add_at, key_read, betas[row], stride)
                    shown = snapshots[s] >= 0 and 0 <= t < own - 1
                    aside = -1
                    for i in range(saves.shape[0]):
                        if saves[i, 0] == s and saves[i, 1] == t + 1:
                            aside = saves[i, 2]
                    rounds = False
                    # `chunked` is None for a float32 state: then these branches are not compiled.
                    if chunked is not None:
                        rounds = chunked[s] == 0 or t == own - 1 or (starts[s] + t + 1) % CHUNK == 0
                    begun = not (rounds or shown or aside >= 0 or row == rows - 1 or t + 1 == kept)
                    if not begun:
                        sweep(
                            state,
                            state_at,
                            state,
                            state_at,
                            dk,
                            stride,
                            mixed,
                            key_at,
                            add_at,
                            query_at,
                            read,
                            row * stride,
                            None,
                            key_at,
                            key_read,
                        )
                    elif t < 0:
                        # Nobody asks what a pending row reads.
                        sweep(
                            state,
                            state_at,
                            state,
                            state_at,
                            dk,
                            stride,
                            mixed,
                            key_at,
                            add_at,
                            None,
                            read,
                            0,
                            decays[row + 1],
                            key_at + width,
                            key_read,
                        )
                    else:
                        sweep(
                            state,
                            state_at,
                            state,
                            state_at,
                            dk,
                            stride,
                            mixed,
                            key_at,
                            add_at,
                            query_at,
                            read,
                            row * stride,
                            decays[row + 1],
                            key_at + width,
                            key_read,
                        )
                    if chunked is not None:
                        if rounds:
                            _round_to_half(state, state_at, size)
                        if shown:
                            _keep_half(state, state_at, stride, snapshot_h[snapshots[s] + t, head])
                        if aside >= 0:
                            _keep_half(state, state_at, stride, saved_h[aside, head])
                    else:
                        if shown:
                            target = ((snapshots[s] + t) * value_heads + head) * dk * dv
                            _keep(state, state_at, stride, snapshot_h, target, dk, dv)
                        if aside >= 0:
                            target = (aside * value_heads + head) * dk * dv
                            _keep(state, state_at, stride, saved_h, target, dk, dv)
                if stride != dv:
                    for i in range(dk):
                        copy(spread, i * stride, h, stored + i * dv, dv)

                for row in range(asked, rows):
                    z_at = gates + ((row - asked) * ratio + place) * stride
                    gated_norm(read, row * stride, mixed, z_at, scale, eps, dv, stride)
                    target = ((first + begin + row) * value_heads + head) * dv
                    copy(read, row * stride, out, target, dv)

            # No other item reads these channels.
            for part in range(parts):
                column, count = part_column[part], part_count[part]
                if begin <= kept <= begin + rows:
                    source = (kept - begin) * width + part_place[part]
                    target = (slot * conv_dim + column) * taps
                    write_history(window, source, width, conv, target, taps, count)
                if snapshots[s] >= 0:
                    for row in range(asked, rows):
                        source = (row + 1) * width + part_place[part]
                        target = (slot * shown_rows + begin + row) * conv_dim + column
                        write_history(
                            window, source, width, snapshot_conv, target * taps, taps, count
                        )
            for tap in range(taps):
                copy(window, (rows + tap) * width, window, tap * width, width)


@parallel_kernel
def _mixer(
    threads: Any,
    proj: Any,
    conv_weight: Any,
    head_decay: Any,
    dt_bias: Any,
    norm: Any,
    eps: Any,
    key_heads: Any,
    dk: Any,
    row_start: Any,
    starts: Any,
    slots: Any,
    committed: Any,
    pending: Any,
    ring_first: Any,
    ring_rows: Any,
    snapshots: Any,
    chunked: Any,
    h: Any,
    conv: Any,
    ring_inputs: Any,
    ring_gates: Any,
    snapshot_h: Any,
    snapshot_conv: Any,
    saves: Any,
    saved_h: Any,
    out: Any,
) -> None:
    items = slots.shape[0] * key_heads
    for thread in prange(threads):
        # As signed numbers, or the whole would be compiled twice.
        begin = np.int64(thread) * items // threads
        end = (np.int64(thread) + 1) * items // threads
        _mix_items(
            begin,
            end,
            proj,
            conv_weight,
            head_decay,
            dt_bias,
            norm,
            eps,
            key_heads,
            dk,
            row_start,
            starts,
            slots,
            committed,
            pending,
            ring_first,
            ring_rows,
            snapshots,
            chunked,
            h,
            conv,
            ring_inputs,
            ring_gates,
            snapshot_h,
            snapshot_conv,
            saves,
            saved_h,
            out,
        )


def gdn_mixer(proj: Tensor, params: GdnParams, state: GdnState, batch: RaggedBatch) -> Tensor:
    """As naive.gdn_mixer, float32, with all rows recurrent: `batch.chunked` says only where a
    float16 state is rounded.
    """
    saved = state.snapshot_h if state.saved_h is None else state.saved_h
    if state.stage is None:
        kept = host(state.snapshot_h), host(saved)
        return _run(proj, params, state, batch, host(state.h), *kept, None)
    stage, slots = state.stage, batch.slots
    stage[slots] = state.h[slots].float()
    kept = host(state.snapshot_h).view(np.uint16), host(saved).view(np.uint16)
    out = _run(proj, params, state, batch, host(stage), *kept, batch.chunked.numpy())
    state.h[slots] = stage[slots].to(torch.float16)
    return out


def _run(
    proj: Tensor,
    params: GdnParams,
    state: GdnState,
    batch: RaggedBatch,
    h: Any,
    snapshot_h: Any,
    saved_h: Any,
    chunked: Any,
) -> Tensor:
    """The kernel on h float32 [slots + 1, Hv, Dk, Dv]."""
    out = proj.new_empty(proj.shape[0], params.value_dim)
    # Otherwise the flat view below were a copy.
    assert h.flags.c_contiguous
    items = batch.slots.shape[0] * params.key_heads
    saves = _NO_SAVES
    if batch.saves is not None:
        saves = host(batch.saves)
        _save_conv(proj.numpy(), host(batch.row_start), saves, state)
    _mixer(
        # Asked here: a kernel that asks cannot be cached on disk.
        min(numba.get_num_threads(), items),
        proj.contiguous().numpy(),
        host(params.conv),
        host(params.decay),
        host(params.dt_bias),
        host(params.norm),
        np.float32(params.eps),
        params.key_heads,
        params.key_width,
        host(batch.row_start),
        host(batch.starts),
        host(batch.slots),
        host(batch.committed),
        host(batch.pending),
        host(batch.ring_first),
        host(batch.ring_rows),
        host(batch.snapshots),
        chunked,
        h.reshape(-1),
        host(state.conv),
        host(state.ring_inputs),
        host(state.ring_gates),
        snapshot_h,
        host(state.snapshot_conv),
        saves,
        saved_h,
        out.numpy(),
    )
    return out


def _save_conv(proj: Any, row_start: Any, saves: Any, state: GdnState) -> None:
    """saved_conv = the inputs of the rows before each of the saves, which are own rows all."""
    assert state.saved_conv is not None, "a state is set aside and there is no room for any"
    saved = host(state.saved_conv)
    _, conv_dim, taps = saved.shape
    for segment, rows, place in saves:
        end = row_start[segment] + rows
        saved[place] = proj[end - taps : end, :conv_dim].T
