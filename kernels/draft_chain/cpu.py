"""The chain in numba: at one or two rows the calls of a pass cost more than its products.

Sums are re-associated here, as nowhere else: a draft's bits decide nothing, the target verifies.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from kernels.attention.cpu import attend, write_kv
from kernels.draft_chain.types import ChainStart, ChainWeights
from kernels.jit import exp32, host, sigmoid32

_fast = numba.njit(
    cache=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"}, inline="never"
)


@_fast
def _product(weight: Any, x: Any, out: Any) -> None:
    """out [N] = weight [N, K] x [K]; the weight is bfloat16 seen as uint16."""
    for n in range(weight.shape[0]):
        row = weight[n]
        total = np.float32(0.0)
        for k in range(row.shape[0]):
            total += np.uint32(np.uint32(row[k]) << np.uint32(16)).view(np.float32) * x[k]
        out[n] = total


@_fast
def _scaled(x: Any, scale: Any, eps: Any, out: Any) -> None:
    """out [H] = the norm of x [H]."""
    total = np.float32(0.0)
    for i in range(x.shape[0]):
        total += x[i] * x[i]
    inverse = np.float32(1.0) / np.sqrt(total / np.float32(x.shape[0]) + eps)
    for i in range(x.shape[0]):
        out[i] = x[i] * inverse * scale[i]


@_fast
def _best(logits: Any) -> Any:
    """(most likely id, its log-probability) of logits [V]."""
    top = np.float32(-np.inf)
    for i in range(logits.shape[0]):
        top = max(top, logits[i])
    place = 0
    while place < logits.shape[0] - 1 and logits[place] != top:
        place += 1
    total = np.float32(0.0)
    for i in range(logits.shape[0]):
        total += exp32(logits[i] - top)
    return place, -np.log(total)


@_fast
def _chain(
    tokens: Any,
    hidden: Any,
    positions: Any,
    owners: Any,
    tables: Any,
    first_key: Any,
    embed: Any,
    fc: Any,
    qkv_weight: Any,
    o: Any,
    gate_up: Any,
    down: Any,
    head: Any,
    norm_embedding: Any,
    norm_hidden: Any,
    input_norm: Any,
    post_norm: Any,
    norm: Any,
    q_norm: Any,
    k_norm: Any,
    cos: Any,
    sin: Any,
    pages_k: Any,
    pages_v: Any,
    eps: Any,
    ids: Any,
    logprobs: Any,
) -> None:
    rows, width = hidden.shape
    inner = down.shape[1]
    joined = np.empty(2 * width, np.float32)
    normed = np.empty(width, np.float32)
    residual = np.empty((rows, width), np.float32)
    qkv = np.empty((rows, qkv_weight.shape[0]), np.float32)
    mixed = np.empty((rows, o.shape[1]), np.float32)
    added = np.empty(width, np.float32)
    gates = np.empty(2 * inner, np.float32)
    logits = np.empty(head.shape[0], np.float32)
    for depth in range(ids.shape[0]):
        for r in range(rows):
            source = embed[tokens[r]]
            for i in range(width):
                added[i] = np.uint32(np.uint32(source[i]) << np.uint32(16)).view(np.float32)
            _scaled(added, norm_embedding, eps, joined[:width])
            _scaled(hidden[r], norm_hidden, eps, joined[width:])
            _product(fc, joined, residual[r])
            _scaled(residual[r], input_norm, eps, normed)
            _product(qkv_weight, normed, qkv[r])
        write_kv(qkv, k_norm, cos, sin, eps, positions, owners, tables, pages_k, pages_v)
        attend(
            qkv,
            q_norm,
            cos,
            sin,
            eps,
            positions,
            owners,
            tables,
            first_key,
            pages_k,
            pages_v,
            mixed,
        )
        for r in range(rows):
            _product(o, mixed[r], added)
            for i in range(width):
                residual[r, i] += added[i]
            _scaled(residual[r], post_norm, eps, normed)
            _product(gate_up, normed, gates)
            for i in range(inner):
                gates[i] = gates[i] * sigmoid32(gates[i]) * gates[inner + i]
            _product(down, gates[:inner], added)
            for i in range(width):
                residual[r, i] += added[i]
            _scaled(residual[r], norm, eps, hidden[r])
            _product(head, hidden[r], logits)
            place, logprob = _best(logits)
            ids[depth, r] = place
            logprobs[depth, r] = logprob
            tokens[r] = place
            positions[r] += 1


def draft_chain(weights: ChainWeights, start: ChainStart, depth: int) -> tuple[Tensor, Tensor]:
    """As naive.draft_chain."""
    rows = len(start.tokens)
    ids = torch.empty((depth, rows), dtype=torch.int64)
    logprobs = torch.empty((depth, rows))
    w, a = weights, weights.attention
    matrices = (w.embed, w.fc, w.qkv, w.o, w.gate_up, w.down, w.head)
    scales = (w.norm_embedding, w.norm_hidden, w.input_norm, w.post_norm, w.norm)
    small = (a.q_norm, a.k_norm, a.cos, a.sin, w.pages.k, w.pages.v)
    _chain(
        start.tokens.numpy().copy(),
        start.hidden.numpy().copy(),
        start.positions.numpy().copy(),
        np.arange(rows),
        start.block_tables.numpy(),
        start.first_key.numpy(),
        *(_stored(matrix) for matrix in matrices),
        *(host(scale) for scale in scales),
        *(host(tensor) for tensor in small),
        np.float32(a.eps),
        ids.numpy(),
        logprobs.numpy(),
    )
    return ids, logprobs


def _stored(matrix: Tensor) -> Any:
    """A bfloat16 matrix as the uint16 that the kernels read, seen once and kept with it."""
    kept = matrix.__dict__
    array = kept.get("_host_view")
    if array is None:
        array = kept["_host_view"] = matrix.contiguous().view(torch.uint16).numpy()
    return array
