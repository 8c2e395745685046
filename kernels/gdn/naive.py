"""The truth of the GDN mixer, in torch, one sequence at a time.

Formulas: Yang et al., "Gated Delta Networks" (arXiv 2412.06464), in the layout of Qwen3-Next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.batch import RaggedBatch
from kernels.gdn.types import GdnParams, GdnState

CHUNK = 64

# q, k, v, g, beta of some rows
Rows = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def wide(x: Tensor) -> Tensor:
    """float32, or float64 where it is given: then the result is a truth for float32 kernels."""
    return x if x.dtype == torch.float64 else x.float()


def l2_normalise(x: Tensor) -> Tensor:
    """x [..., D] / sqrt(sum x^2 + 1e-6): the epsilon is inside the root, on the sum."""
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


LARGEST_HALF = 65504.0


def to_half(state: Tensor) -> Tensor:
    """Every number as the nearest that float16 holds, in its own type; see kernels.gdn.half.

    What is not finite becomes a NaN, since x - x is 0 for all else.
    """
    return state.clamp(-LARGEST_HALF, LARGEST_HALF).half().to(state.dtype) + (state - state)


def as_it_is(state: Tensor) -> Tensor:
    """No rounding."""
    return state


Settle = Callable[[Tensor], Tensor]


def recurrent_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    settle: Settle = as_it_is,
) -> tuple[Tensor, Tensor]:
    """Token by token. q, k [T, Hv, Dk] (normalised, q scaled), v [T, Hv, Dv], g, beta [T, Hv].

    state [Hv, Dk, Dv] float32 is read, not written. Returns (out [T, Hv, Dv], new state):
    S <- exp(g) S; u = beta (v - S^T k); S <- S + k u^T; o = S^T q. `settle` is what becomes of S
    behind every row.
    """
    outputs = []
    for t in range(q.shape[0]):
        state = state * torch.exp(g[t])[:, None, None]
        read = (state * k[t][:, :, None]).sum(1)
        update = beta[t][:, None] * (v[t] - read)
        state = state + k[t][:, :, None] * update[:, None, :]
        outputs.append((state * q[t][:, :, None]).sum(1))
        state = settle(state)
    return torch.stack(outputs), state


def chunked_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    settle: Settle = as_it_is,
) -> tuple[Tensor, Tensor]:
    """The same recurrence in chunks of 64 (WY form); arguments and result as recurrent_rows, but
    that the state is settled behind every chunk.

    Inside a chunk, with G the running sum of g and D_ij = exp(G_i - G_j) for i >= j:
    A = strict_lower(beta k k^T D), T = (I + A)^-1, U = T (beta v), W = T (beta exp(G) k),
    V' = U - W S, out = (q exp(G)) S + lower(q k^T D) V',
    S' = exp(G_end) S + (k exp(G_end - G))^T V'.
    """
    length = q.shape[0]
    padding = -length % CHUNK

    def heads_first(x: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, padding)).transpose(0, 1)
        return padded.reshape(padded.shape[0], -1, CHUNK, padded.shape[2])  # [Hv, chunks, 64, D]

    query, key, value = heads_first(q), heads_first(k), heads_first(v)
    gate = heads_first(g[..., None]).squeeze(-1).cumsum(-1)  # [Hv, chunks, 64]
    strength = heads_first(beta[..., None])
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    # Masked before exp: above the diagonal the difference is positive and may overflow.
    decay = (gate[..., :, None] - gate[..., None, :]).masked_fill(~lower, -torch.inf).exp()
    weighted_key = key * strength
    a = ((weighted_key @ key.mT) * decay).tril(-1)
    identity = torch.eye(CHUNK, dtype=q.dtype, device=q.device)
    inverse = torch.linalg.solve_triangular(
        a + identity, identity.expand_as(a), upper=False, unitriangular=True
    )
    u = inverse @ (value * strength)
    w = inverse @ (weighted_key * gate.exp()[..., None])
    within = (query @ key.mT) * decay
    outputs = []
    for c in range(query.shape[1]):
        fresh = u[:, c] - w[:, c] @ state
        outputs.append((query[:, c] * gate[:, c].exp()[..., None]) @ state + within[:, c] @ fresh)
        end = gate[:, c, -1]
        shrunk = key[:, c] * (end[:, None] - gate[:, c]).exp()[..., None]
        state = settle(state * end.exp()[:, None, None] + shrunk.mT @ fresh)
    return torch.cat(outputs, 1).transpose(0, 1)[:length], state


def gated_norm(o: Tensor, z: Tensor, scale: Tensor, eps: float) -> Tensor:
    """o, z [T, Hv, Dv] -> (scale * o / sqrt(mean o^2 + eps)) * silu(z), in fp32 or fp64."""
    normed = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + eps)
    return scale * normed * torch.nn.functional.silu(wide(z))


def gdn_mixer(proj: Tensor, params: GdnParams, state: GdnState, batch: RaggedBatch) -> Tensor:
    """proj [R, conv_dim + value_dim + 2 Hv], columns [q | k | v | z | b | a] -> [R, value_dim].

    Updates the state of every slot in the batch to what it is after the pending and the committed
    rows, and leaves rows in the ring and snapshots behind as the batch asks. A sequence without own
    rows has its pending ones folded in.
    """
    out = torch.empty(proj.shape[0], params.value_dim, dtype=proj.dtype, device=proj.device)
    row_start = batch.row_start.tolist()
    fields = (batch.slots, batch.starts, batch.committed, batch.pending, batch.chunked)
    kept = (batch.ring_first, batch.ring_rows, batch.snapshots)
    saves: list[list[tuple[int, int]]] = [[] for _ in range(len(batch.slots))]
    for s, count, place in () if batch.saves is None else batch.saves.tolist():
        saves[s].append((count, place))
    for s, values in enumerate(zip(*(f.tolist() for f in fields + kept), saves, strict=True)):
        rows = slice(row_start[s], row_start[s + 1])
        part = _Part(*values)
        if rows.start == rows.stop and not part.pending:
            continue
        out[rows] = _one_sequence(wide(proj[rows]), params, state, part).to(proj.dtype)
    return out


def _cut(rows: Rows, start: int, end: int) -> Rows:
    q, k, v, g, beta = (x[start:end] for x in rows)
    return q, k, v, g, beta


@dataclass(frozen=True, slots=True)
class _Part:
    """One sequence's entries of the batch, as plain numbers."""

    slot: int
    start: int
    committed: int
    pending: int
    chunked: int
    ring_first: int
    ring_rows: int
    snapshot: int
    saves: list[tuple[int, int]]


def _one_sequence(proj: Tensor, params: GdnParams, state: GdnState, part: _Part) -> Tensor:
    slot, pending = part.slot, part.pending
    conv_dim, value_dim, hv = params.conv_dim, params.value_dim, params.value_heads
    raw, z, b, a = proj.split((conv_dim, value_dim, hv, hv), dim=-1)
    own_g = params.decay * torch.nn.functional.softplus(a + params.dt_bias)
    own_beta = torch.sigmoid(b)
    g, beta = own_g, own_beta
    if pending:
        raw = torch.cat((wide(state.ring_inputs[slot, :pending, :conv_dim]), raw))
        gates = state.ring_gates[slot, :pending]
        g, beta = torch.cat((gates[:, 0], g)), torch.cat((gates[:, 1], beta))

    fresh = part.start == 0
    taps = params.conv.shape[0]
    history = torch.zeros_like(state.conv[slot]) if fresh else state.conv[slot].clone()
    # [taps + rows, conv_dim]: the state after n rows is window[n : n + taps].
    window = torch.cat((history.T, raw))
    mixed = torch.nn.functional.conv1d(
        window[1:].T[None], wide(params.conv.T[:, None, :]), groups=conv_dim
    )[0].T
    mixed = torch.nn.functional.silu(mixed)
    key_dim = params.key_heads * params.key_width
    q, k, v = mixed.split((key_dim, key_dim, value_dim), dim=-1)
    ratio = hv // params.key_heads
    q, k = (
        l2_normalise(x.unflatten(-1, (params.key_heads, -1))).repeat_interleave(ratio, 1)
        for x in (q, k)
    )
    rows: Rows = (q * params.key_width**-0.5, k, v.unflatten(-1, (hv, -1)), g, beta)

    settle = to_half if state.h.dtype == torch.float16 else as_it_is
    h = wide(torch.zeros_like(state.h[slot]) if fresh else state.h[slot])
    kept, total = pending + part.committed, pending + proj.shape[0]
    if part.snapshot >= 0:
        # Row by row, and the state after every one but the last is kept.
        outputs = []
        for t in range(total):
            o, h = recurrent_rows(*_cut(rows, t, t + 1), h, settle)
            outputs.append(o)
            own = t - pending
            if 0 <= own < proj.shape[0] - 1:
                state.snapshot_h[part.snapshot + own] = h
            if own >= 0:
                state.snapshot_conv[slot, own] = window[t + 1 : t + 1 + taps].T
        o, after = torch.cat(outputs), h
    else:
        run = chunked_rows if part.chunked else recurrent_rows
        outputs, after, done = [], h, 0
        for own, place in part.saves:
            assert state.saved_h is not None, "a state is set aside and there is no room for any"
            assert state.saved_conv is not None
            end = pending + own
            o, after = run(*_cut(rows, done, end), after, settle)
            outputs.append(o)
            done = end
            state.saved_h[place] = after
            state.saved_conv[place] = window[end : end + taps].T
        if done < kept:
            o, after = run(*_cut(rows, done, kept), after, settle)
            outputs.append(o)
        o = torch.cat(outputs)
        if kept < total:
            o = torch.cat((o, recurrent_rows(*_cut(rows, kept, total), after, settle)[0]))
    state.h[slot] = after
    state.conv[slot] = window[kept : kept + taps].T
    if part.ring_rows:
        left = slice(part.ring_first, part.ring_first + part.ring_rows)
        width = state.ring_inputs.shape[2]
        state.ring_inputs[slot, : part.ring_rows] = proj[left, :width]
        state.ring_gates[slot, : part.ring_rows, 0] = own_g[left]
        state.ring_gates[slot, : part.ring_rows, 1] = own_beta[left]
    gated = gated_norm(o[pending:], z.unflatten(-1, (hv, -1)), params.norm, params.eps)
    return gated.flatten(1)
