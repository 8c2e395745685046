"""Random layers, states and ragged batches for the operator tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import TypeVar

import torch
from torch import Tensor

from kernels.attention.types import AttentionParams, KvPages
from kernels.batch import RaggedBatch
from kernels.gdn.types import GdnParams, GdnState
from kernels.ragged import Rows, blocks_by_slot, ragged_batch

Record = TypeVar("Record", GdnParams, GdnState, RaggedBatch)
Mixer = Callable[[Tensor, GdnParams, GdnState, RaggedBatch], Tensor]

DRAFTS = 3
PLACES = 3
PAGE = 64


def make_batch(rows: list[Rows], blocks_per_sequence: int = 5) -> RaggedBatch:
    """Sequences get disjoint blocks by slot."""
    return ragged_batch(rows, blocks_by_slot(rows, blocks_per_sequence))


def gdn_params(hk: int, hv: int, dk: int, dv: int, seed: int = 0) -> GdnParams:
    """Gates from nearly none to strong decay, so that an error in them shows."""
    g = torch.Generator().manual_seed(seed)
    conv_dim = 2 * hk * dk + hv * dv
    return GdnParams(
        conv=torch.randn(4, conv_dim, generator=g) * 0.5,
        decay=-torch.empty(hv).uniform_(0.01, 4.0, generator=g),
        dt_bias=torch.randn(hv, generator=g) * 0.5,
        norm=1 + torch.randn(dv, generator=g) * 0.1,
        key_heads=hk,
        value_heads=hv,
        key_width=dk,
        value_width=dv,
        eps=1e-6,
    )


def gdn_state(params: GdnParams, slots: int, seed: int = 1) -> GdnState:
    """Random contents: what an earlier tenant left."""
    g = torch.Generator().manual_seed(seed)
    p = params
    return GdnState(
        h=torch.randn(slots, p.value_heads, p.key_width, p.value_width, generator=g) * 0.3,
        conv=torch.randn(slots, p.conv_dim, 4, generator=g),
        ring_inputs=torch.randn(slots, DRAFTS, p.conv_dim, generator=g),
        ring_gates=torch.stack(
            (
                -torch.rand(slots, DRAFTS, p.value_heads, generator=g),
                torch.rand(slots, DRAFTS, p.value_heads, generator=g),
            ),
            dim=2,
        ),
        snapshot_h=torch.randn(2 * DRAFTS, p.value_heads, p.key_width, p.value_width, generator=g),
        snapshot_conv=torch.randn(slots, DRAFTS + 1, p.conv_dim, 4, generator=g),
        saved_h=torch.randn(PLACES, p.value_heads, p.key_width, p.value_width, generator=g),
        saved_conv=torch.randn(PLACES, p.conv_dim, 4, generator=g),
    )


def clone_state(state: GdnState) -> GdnState:
    tensors = (getattr(state, name) for name in state.__slots__)
    return GdnState(*(None if tensor is None else tensor.clone() for tensor in tensors))


def moved(record: Record, device: torch.device) -> Record:
    """A copy whose tensors are on the device."""
    values = {f.name: getattr(record, f.name) for f in fields(record)}
    return replace(record, **{n: x.to(device) for n, x in values.items() if isinstance(x, Tensor)})


def gdn_proj(params: GdnParams, rows: int, seed: int = 2) -> Tensor:
    width = params.conv_dim + params.value_dim + 2 * params.value_heads
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def attention_params(heads: int, kv_heads: int, width: int, length: int = 320) -> AttentionParams:
    g = torch.Generator().manual_seed(3)
    half = width // 8
    angle = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(half) / half)
    return AttentionParams(
        q_norm=1 + torch.randn(width, generator=g) * 0.1,
        k_norm=1 + torch.randn(width, generator=g) * 0.1,
        cos=angle.cos(),
        sin=angle.sin(),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width,
        eps=1e-6,
    )


def kv_pages(blocks: int, kv_heads: int, width: int, seed: int = 4) -> KvPages:
    g = torch.Generator().manual_seed(seed)
    return KvPages(
        k=torch.randn(blocks, kv_heads, width, PAGE, generator=g),
        v=torch.randn(blocks, kv_heads, PAGE, width, generator=g),
    )


def half_state(params: GdnParams, slots: int, seed: int = 1) -> GdnState:
    """`gdn_state` with h and its snapshots in float16, and the stage to run rows in."""
    state = gdn_state(params, slots, seed)
    return replace(
        state,
        h=state.h.half(),
        snapshot_h=state.snapshot_h.half(),
        saved_h=None if state.saved_h is None else state.saved_h.half(),
        stage=torch.full(state.h.shape, torch.nan),
    )


def expect_states_set_aside(
    mixer: Mixer,
    params: GdnParams,
    states: tuple[GdnState, GdnState],
    proj: Tensor,
    batch: Callable[[list[Rows]], RaggedBatch],
) -> None:
    """A prompt sets aside, on its way, the states that it has when it is split there.

    states: two with the same contents and two slots; proj: of 141 rows.
    """
    whole, parts = states
    saves = ((64, 2), (128, 0))
    rows = [Rows(0, 9, 1), Rows(1, 64, 140, chunked=True, saves=saves)]
    assert whole.saved_h is not None
    assert whole.saved_conv is not None
    untouched = whole.saved_h[1].clone()
    want = mixer(proj, params, whole, batch(rows))
    start, got = 0, []
    for count, place in ((64, 2), (64, 0), (12, None)):
        part = proj[1 + start : 1 + start + count]
        got.append(mixer(part, params, parts, batch([Rows(1, 64 + start, count, chunked=True)])))
        start += count
        if place is not None:
            assert torch.equal(whole.saved_h[place], parts.h[1])
            assert torch.equal(whole.saved_conv[place][:, 1:], parts.conv[1][:, 1:])
    assert torch.equal(torch.cat(got), want[1:])
    assert torch.equal(parts.h[1], whole.h[1])
    assert torch.equal(whole.saved_h[1], untouched)
