"""The truth of the GDN mixer, in torch, one sequence at a time.

Formulas: Yang et al., "Gated Delta Networks" (arXiv 2412.06464), in the layout of Qwen3-Next.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.batch import RaggedBatch
from kernels.gdn.types import GdnParams, GdnState

CHUNK = 64


def l2_normalise(x: Tensor) -> Tensor:
    """x [..., D] / sqrt(sum x^2 + 1e-6): the epsilon is inside the root, on the sum."""
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


def recurrent_rows(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Token by token. q, k [T, Hv, Dk] (normalised, q scaled), v [T, Hv, Dv], g, beta [T, Hv].

    state [Hv, Dk, Dv] float32 is read, not written. Returns (out [T, Hv, Dv], new state):
    S <- exp(g) S; u = beta (v - S^T k); S <- S + k u^T; o = S^T q.
    """
    outputs = []
    for t in range(q.shape[0]):
        state = state * torch.exp(g[t])[:, None, None]
        read = (state * k[t][:, :, None]).sum(1)
        update = beta[t][:, None] * (v[t] - read)
        state = state + k[t][:, :, None] * update[:, None, :]
        outputs.append((state * q[t][:, :, None]).sum(1))
    return torch.stack(outputs), state


def chunked_rows(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The same recurrence in chunks of 64 (WY form); arguments and result as recurrent_rows.

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
        state = state * end.exp()[:, None, None] + shrunk.mT @ fresh
    return torch.cat(outputs, 1).transpose(0, 1)[:length], state


def gated_norm(o: Tensor, z: Tensor, scale: Tensor, eps: float) -> Tensor:
    """o, z [T, Hv, Dv] -> (scale * o / sqrt(mean o^2 + eps)) * silu(z), in fp32."""
    normed = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + eps)
    return scale * normed * torch.nn.functional.silu(z.float())


def gdn_mixer(proj: Tensor, params: GdnParams, state: GdnState, batch: RaggedBatch) -> Tensor:
    """proj [R, conv_dim + value_dim + 2 Hv], columns [q | k | v | z | b | a] -> [R, value_dim].

    Updates the state of every slot in the batch to what it is after the pending and the committed
    rows, and leaves the other rows in the slot's ring.
    """
    row_start, slots = batch.row_start.tolist(), batch.slots.tolist()
    starts, committed = batch.starts.tolist(), batch.committed.tolist()
    pending, chunked = batch.pending.tolist(), batch.chunked.tolist()
    out = torch.empty(proj.shape[0], params.value_dim, dtype=proj.dtype, device=proj.device)
    for s, slot in enumerate(slots):
        rows = slice(row_start[s], row_start[s + 1])
        out[rows] = _one_sequence(
            proj[rows].float(),
            params,
            state,
            slot,
            fresh=starts[s] == 0,
            pending=pending[s],
            committed=committed[s],
            chunked=bool(chunked[s]),
        ).to(proj.dtype)
    return out


def _one_sequence(
    proj: Tensor,
    params: GdnParams,
    state: GdnState,
    slot: int,
    *,
    fresh: bool,
    pending: int,
    committed: int,
    chunked: bool,
) -> Tensor:
    own = proj.shape[0]
    conv_dim, value_dim, hv = params.conv_dim, params.value_dim, params.value_heads
    raw, z, b, a = proj.split((conv_dim, value_dim, hv, hv), dim=-1)
    g = params.decay * torch.nn.functional.softplus(a + params.dt_bias)
    beta = torch.sigmoid(b)
    if pending:
        raw = torch.cat((state.ring_inputs[slot, :pending].float(), raw))
        gates = state.ring_gates[slot, :pending]
        g, beta = torch.cat((gates[:, 0], g)), torch.cat((gates[:, 1], beta))

    taps = params.conv.shape[0]
    history = state.conv[slot].T[1:] * 1.0
    if fresh:
        history = torch.zeros_like(history)
    window = torch.cat((history, raw))  # [taps - 1 + rows, conv_dim]
    mixed = torch.nn.functional.conv1d(
        window.T[None], params.conv.T[:, None, :].float(), groups=conv_dim
    )[0].T
    mixed = torch.nn.functional.silu(mixed)
    key_dim = params.key_heads * params.key_width
    q, k, v = mixed.split((key_dim, key_dim, value_dim), dim=-1)
    ratio = hv // params.key_heads
    q, k = (
        l2_normalise(x.unflatten(-1, (params.key_heads, -1))).repeat_interleave(ratio, 1)
        for x in (q, k)
    )
    q = q * params.key_width**-0.5
    v = v.unflatten(-1, (hv, -1))

    h = torch.zeros_like(state.h[slot]) if fresh else state.h[slot]
    kept = pending + committed
    run = chunked_rows if chunked else recurrent_rows
    o, after = run(q[:kept], k[:kept], v[:kept], g[:kept], beta[:kept], h)
    if committed < own:
        rest, _ = recurrent_rows(q[kept:], k[kept:], v[kept:], g[kept:], beta[kept:], after)
        o = torch.cat((o, rest))
        open_rows = own - committed
        state.ring_inputs[slot, :open_rows] = raw[kept:]
        state.ring_gates[slot, :open_rows, 0] = g[kept:]
        state.ring_gates[slot, :open_rows, 1] = beta[kept:]
    state.h[slot] = after
    state.conv[slot] = torch.cat((torch.zeros_like(window[:1]), window))[kept : kept + taps].T
    gated = gated_norm(o[pending:], z.unflatten(-1, (hv, -1)), params.norm, params.eps)
    return gated.flatten(1)
