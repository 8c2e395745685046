"""The GDN mixer in one numba loop nest: every state is read once and written once per step.

Each (sequence, value head) runs its rows one after another from the convolution to the gated norm,
so a row's bits depend neither on its neighbours nor on where a prompt was split. The chunked form
is not used on a CPU: it saves nothing there (docs/decisions.md).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from kernels.batch import RaggedBatch
from kernels.gdn.half import half_bits, nearest_half
from kernels.gdn.naive import CHUNK
from kernels.gdn.types import GdnParams, GdnState
from kernels.jit import exp32, host, inline, parallel_kernel, sigmoid32, sum_of_squares

_ONE = np.float32(1.0)
_EPS_L2 = np.float32(1e-6)


@inline
def _softplus(x: Any) -> Any:
    return x if x > np.float32(20.0) else np.log1p(np.exp(x))


@inline
def _delta_rule(state: Any, q: Any, k: Any, v: Any, decay: Any, beta: Any, out: Any) -> None:
    """One token on state [Dk, Dv]: decay, read at k, write the correction, read at q."""
    dk, dv = state.shape
    for j in range(dv):
        out[j] = np.float32(0.0)
    for i in range(dk):
        row = state[i]
        weight = k[i]
        for j in range(dv):
            row[j] *= decay
            out[j] += weight * row[j]
    for j in range(dv):
        v[j] = beta * (v[j] - out[j])
        out[j] = np.float32(0.0)
    for i in range(dk):
        row = state[i]
        weight = k[i]
        read = q[i]
        for j in range(dv):
            row[j] += weight * v[j]
            out[j] += read * row[j]


@inline
def _conv_after(
    proj: Any,
    first: Any,
    before: Any,
    rows: Any,
    fresh: Any,
    ring_inputs: Any,
    conv: Any,
    slot: Any,
    out: Any,
) -> None:
    """out [conv_dim, kernel] = the last inputs after `before` ring rows and `rows` own rows.

    `out` may be conv[slot] itself: what a tap reads lies further right than what it overwrites.
    """
    conv_dim, taps = out.shape
    for c in range(conv_dim):
        for tap in range(taps):
            t = rows - taps + tap
            if t >= 0:
                value = proj[first + t, c]
            elif t >= -before:
                value = ring_inputs[slot, before + t, c]
            elif fresh:
                value = np.float32(0.0)
            else:
                value = conv[slot, c, taps + before + t]
            out[c, tap] = value


@inline
def _round_to_half(state: Any) -> None:
    """state [Dk, Dv]: every number becomes the nearest that float16 holds."""
    dk, dv = state.shape
    for i in range(dk):
        row = state[i]
        for j in range(dv):
            row[j] = nearest_half(row[j])


@inline
def _keep_half(state: Any, out: Any) -> None:
    """out [Dk, Dv] uint16 = the float16 bits of a state that float16 holds."""
    dk, dv = state.shape
    for i in range(dk):
        for j in range(dv):
            out[i, j] = half_bits(state[i, j])


@parallel_kernel
def _mixer(
    proj: Any,
    conv_weight: Any,
    head_decay: Any,
    dt_bias: Any,
    norm: Any,
    eps: Any,
    key_heads: Any,
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
    out: Any,
) -> None:
    value_heads, dk, dv = h.shape[1], h.shape[2], h.shape[3]
    taps, conv_dim = conv_weight.shape
    ratio = value_heads // key_heads
    key_dim = key_heads * dk
    value_dim = value_heads * dv
    width = 2 * dk + dv
    segments = slots.shape[0]
    for item in prange(segments * value_heads):
        s = item // value_heads
        head = item % value_heads
        slot = slots[s]
        fresh = starts[s] == 0
        before = pending[s]
        first = row_start[s]
        own = row_start[s + 1] - first
        kept = committed[s]
        key_base = (head // ratio) * dk
        # Columns of this head's q, k and v among the convolved channels.
        columns = np.empty(3, np.int64)
        columns[0] = key_base
        columns[1] = key_dim + key_base
        columns[2] = 2 * key_dim + head * dv
        widths = np.empty(3, np.int64)
        widths[0] = dk
        widths[1] = dk
        widths[2] = dv

        weights = np.empty((taps, width), np.float32)
        window = np.zeros((taps, width), np.float32)
        offset = 0
        for part in range(3):
            for c in range(widths[part]):
                for tap in range(taps):
                    weights[tap, offset + c] = conv_weight[tap, columns[part] + c]
                if not fresh:
                    for tap in range(1, taps):
                        window[tap, offset + c] = conv[slot, columns[part] + c, tap]
            offset += widths[part]

        mixed = np.empty(width, np.float32)
        read = np.empty(dv, np.float32)
        state = h[slot, head]
        if fresh:
            state[:] = np.float32(0.0)
        newest = taps - 1
        for t in range(-before, own):
            if t == kept:
                # Rows from here on may be rejected: they run on a copy that nobody keeps.
                state = state.copy()
            newest = (newest + 1) % taps
            offset = 0
            for part in range(3):
                column = columns[part]
                if t < 0:
                    for c in range(widths[part]):
                        window[newest, offset + c] = ring_inputs[slot, before + t, column + c]
                else:
                    for c in range(widths[part]):
                        window[newest, offset + c] = proj[first + t, column + c]
                offset += widths[part]
            for c in range(width):
                mixed[c] = np.float32(0.0)
            for tap in range(taps):
                source = window[(newest + 1 + tap) % taps]
                weight = weights[tap]
                for c in range(width):
                    mixed[c] += weight[c] * source[c]
            for c in range(width):
                mixed[c] *= sigmoid32(mixed[c])
            q = mixed[:dk]
            k = mixed[dk : 2 * dk]
            v = mixed[2 * dk :]
            q_scale = _ONE / np.sqrt(sum_of_squares(q) + _EPS_L2) / np.sqrt(np.float32(dk))
            k_scale = _ONE / np.sqrt(sum_of_squares(k) + _EPS_L2)
            for c in range(dk):
                q[c] *= q_scale
                k[c] *= k_scale

            if t < 0:
                g = ring_gates[slot, before + t, 0, head]
                beta = ring_gates[slot, before + t, 1, head]
            else:
                gates = conv_dim + value_dim
                beta = sigmoid32(proj[first + t, gates + head])
                raw = proj[first + t, gates + value_heads + head] + dt_bias[head]
                g = head_decay[head] * _softplus(raw)
            _delta_rule(state, q, k, v, exp32(g), beta, read)
            # `chunked` is None for a float32 state: then these branches are not compiled.
            if chunked is not None:
                last = t == own - 1 or (starts[s] + t + 1) % CHUNK == 0
                if chunked[s] == 0 or last:
                    _round_to_half(state)
            if snapshots[s] >= 0 and 0 <= t < own - 1:
                if chunked is None:
                    # Not as one assignment, whose checks of shapes take two seconds to compile.
                    kept_here = snapshot_h[snapshots[s] + t, head]
                    for i in range(dk):
                        for j in range(dv):
                            kept_here[i, j] = state[i, j]
                else:
                    _keep_half(state, snapshot_h[snapshots[s] + t, head])

            if t >= 0:
                mean = sum_of_squares(read) / np.float32(dv)
                inverse = _ONE / np.sqrt(mean + eps)
                for c in range(dv):
                    z = proj[first + t, conv_dim + head * dv + c]
                    out[first + t, head * dv + c] = (
                        norm[c] * (read[c] * inverse) * (z * sigmoid32(z))
                    )

    # A second pass, after every reader: heads share the channels of q and k.
    gates = conv_dim + value_dim
    columns_kept = ring_inputs.shape[2]
    for s in prange(segments):
        slot = slots[s]
        before = pending[s]
        first = row_start[s]
        own = row_start[s + 1] - first
        fresh = starts[s] == 0
        if snapshots[s] >= 0:
            for t in range(own):
                after = snapshot_conv[slot, t]
                _conv_after(proj, first, before, t + 1, fresh, ring_inputs, conv, slot, after)
        _conv_after(proj, first, before, committed[s], fresh, ring_inputs, conv, slot, conv[slot])
        for place in range(ring_rows[s]):
            row = first + ring_first[s] + place
            for c in range(columns_kept):
                ring_inputs[slot, place, c] = proj[row, c]
            for head in range(value_heads):
                raw = proj[row, gates + value_heads + head] + dt_bias[head]
                ring_gates[slot, place, 0, head] = head_decay[head] * _softplus(raw)
                ring_gates[slot, place, 1, head] = sigmoid32(proj[row, gates + head])


def gdn_mixer(proj: Tensor, params: GdnParams, state: GdnState, batch: RaggedBatch) -> Tensor:
    """As naive.gdn_mixer, float32, with all rows recurrent: `batch.chunked` says only where a
    float16 state is rounded.
    """
    if state.stage is None:
        return _run(proj, params, state, batch, host(state.h), host(state.snapshot_h), None)
    stage, slots = state.stage, batch.slots
    stage[slots] = state.h[slots].float()
    snapshots = host(state.snapshot_h).view(np.uint16)
    chunked = batch.chunked.numpy()
    out = _run(proj, params, state, batch, host(stage), snapshots, chunked)
    state.h[slots] = stage[slots].to(torch.float16)
    return out


def _run(
    proj: Tensor,
    params: GdnParams,
    state: GdnState,
    batch: RaggedBatch,
    h: Any,
    snapshot_h: Any,
    chunked: Any,
) -> Tensor:
    """The kernel on h float32 [slots + 1, Hv, Dk, Dv]."""
    out = proj.new_empty(proj.shape[0], params.value_dim)
    _mixer(
        proj.numpy(),
        host(params.conv),
        host(params.decay),
        host(params.dt_bias),
        host(params.norm),
        np.float32(params.eps),
        params.key_heads,
        batch.row_start.numpy(),
        batch.starts.numpy(),
        batch.slots.numpy(),
        batch.committed.numpy(),
        batch.pending.numpy(),
        batch.ring_first.numpy(),
        batch.ring_rows.numpy(),
        batch.snapshots.numpy(),
        chunked,
        h,
        host(state.conv),
        host(state.ring_inputs),
        host(state.ring_gates),
        snapshot_h,
        host(state.snapshot_conv),
        out.numpy(),
    )
    return out
