"""Cases of the GDN mixer: small ragged steps, and on a card the layers of 0.8B and 27B."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kernels.batch import RaggedBatch
from kernels.cases import Case, CaseSize
from kernels.gdn.naive import CHUNK
from kernels.gdn.naive import gdn_mixer as naive_mixer
from kernels.gdn.types import GdnParams, GdnState
from kernels.ragged import Rows, ragged_batch

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
DRAFTS = 3
TAPS = 4
FLOAT32_BYTES = 4
# A verify in carry mode finds rows that the step before has accepted; on average more than one.
PENDING = 2


@dataclass(frozen=True, slots=True)
class _Heads:
    """Hk, Hv, Dk and Dv of one layer."""

    name: str
    hk: int
    hv: int
    dk: int
    dv: int

    @property
    def conv_dim(self) -> int:
        return 2 * self.hk * self.dk + self.hv * self.dv

    @property
    def columns(self) -> int:
        return self.conv_dim + self.hv * self.dv + 2 * self.hv


@dataclass(frozen=True, slots=True)
class _Rows:
    """`count` rows of a sequence that consumed `start` tokens."""

    start: int
    count: int
    mode: str = "plain"
    saves: tuple[int, ...] = ()

    @property
    def committed(self) -> int:
        return 1 if self.mode == "carry" else self.count

    @property
    def pending(self) -> int:
        return PENDING if self.mode == "carry" else 0

    @property
    def ring(self) -> tuple[int, int]:
        """First and number of the rows that stay in the ring."""
        if self.mode == "carry":
            return 1, self.count - 1
        return 0, self.count - 1 if self.mode == "replay" else 0

    @property
    def states(self) -> int:
        """States that are written."""
        return len(self.saves) + (self.count if self.mode == "snapshot" else 1)


SMALL = _Heads("heads 2 over 1 of 32 x 16", 1, 2, 32, 16)
# configs/geometries: qwen3.5-0.8b and qwen3.6-27b.
MODELS = [_Heads("0.8B", 16, 16, 128, 128), _Heads("27B", 16, 48, 128, 128)]
MODES = ("carry", "replay", "snapshot")
SMOKE = {
    "decode": [_Rows(0, 1), _Rows(9, 1)],
    **{f"verify {mode}": [_Rows(9, 4, mode), _Rows(5, 1)] for mode in MODES},
    "prefill beside decode": [_Rows(64, 65, "chunked"), _Rows(9, 1), _Rows(0, 3, "chunked")],
    "states set aside": [
        _Rows(9, 1),
        _Rows(64, 130, "chunked", (64, 128)),
        _Rows(0, 64, "chunked", (64,)),
    ],
}


def cases(size: CaseSize, device: torch.device) -> list[Case]:
    """SMOKE in float32 and bfloat16; CARD in bfloat16: decode, verify of 4 rows, prompts."""
    if size is CaseSize.SMOKE:
        return [
            _case(SMALL, name, rows, dtype, device)
            for dtype in TOLERANCE
            for name, rows in SMOKE.items()
        ]
    return [
        _case(heads, name, rows, torch.bfloat16, device)
        for heads in MODELS
        for name, rows in _card_steps().items()
    ]


def _card_steps() -> dict[str, list[_Rows]]:
    steps = {f"decode {n}": [_Rows(100, 1)] * n for n in (1, 16, 32, 128)}
    for mode in MODES:
        for n in (1, 16, 32):
            steps[f"verify 4 {mode} {n}"] = [_Rows(100, DRAFTS + 1, mode)] * n
    for length in (512, 4096):
        steps[f"prefill {length}"] = [_Rows(0, length, "chunked", (length - CHUNK,))]
    return steps


def in_float64(record: Any) -> Any:
    """A copy of a frozen dataclass whose tensors are float64: naive.gdn_mixer then is a truth."""
    return _tensors(record, Tensor.double)


def _tensors(record: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A copy of a frozen dataclass with every tensor changed."""
    values = {f.name: getattr(record, f.name) for f in fields(record)}
    return replace(record, **{n: change(x) for n, x in values.items() if isinstance(x, Tensor)})


def read_part(state: GdnState) -> list[Tensor]:
    """What later steps read of a state; the oldest column of a conv window is none of it."""
    parts = [
        state.h,
        state.conv[..., 1:],
        state.ring_inputs,
        state.ring_gates,
        state.snapshot_h,
        state.snapshot_conv[..., 1:],
    ]
    if state.saved_h is not None and state.saved_conv is not None:
        parts += [state.saved_h, state.saved_conv[..., 1:]]
    return parts


@dataclass(frozen=True, slots=True)
class _Scene:
    """One set of inputs; `state` is the master copy."""

    proj: Tensor
    params: GdnParams
    state: GdnState
    batch: RaggedBatch


def _case(
    heads: _Heads, name: str, rows: list[_Rows], dtype: torch.dtype, device: torch.device
) -> Case:
    from kernels.gdn.triton import gdn_mixer

    # One scene is kept per case and not one per call: timing would otherwise measure its making.
    scene = cache(lambda: _scene(heads, rows, dtype, device))

    def run() -> list[Tensor]:
        s = scene()
        state = _tensors(s.state, Tensor.clone)
        return [gdn_mixer(s.proj, s.params, state, s.batch), *read_part(state)]

    def truth() -> list[Tensor]:
        s = scene()
        state, params = in_float64(s.state), in_float64(s.params)
        return [naive_mixer(s.proj.double(), params, state, s.batch), *read_part(state)]

    def step() -> Tensor:
        s = scene()
        return gdn_mixer(s.proj, s.params, s.state, s.batch)

    return Case(
        name=f"{name} {heads.name}",
        dtype=dtype,
        run=run,
        truth=truth,
        step=step,
        tolerance=TOLERANCE[dtype],
        bytes=_least_bytes(heads, rows, dtype),
        flops=_flops(heads, rows),
    )


def _least_bytes(heads: _Heads, rows: list[_Rows], dtype: torch.dtype) -> int:
    """Every state read once and written as often as asked, rows, conv windows and rings once."""
    own = sum(r.count for r in rows)
    state = heads.hv * heads.dk * heads.dv
    ring_row = heads.conv_dim + 2 * heads.hv
    numbers = sum((min(r.start, 1) + r.states) * state for r in rows)
    numbers += sum(2 * TAPS * heads.conv_dim + (r.pending + r.ring[1]) * ring_row for r in rows)
    numbers += TAPS * heads.conv_dim
    return numbers * FLOAT32_BYTES + own * (heads.columns + heads.hv * heads.dv) * dtype.itemsize


def _flops(heads: _Heads, rows: list[_Rows]) -> int:
    """Seven per number of a state and row; in chunks, the products of the WY form."""
    total = 0
    for r in rows:
        count = r.pending + r.count
        total += count * 2 * TAPS * heads.conv_dim
        per_row = 7 * heads.dk * heads.dv
        if r.mode == "chunked":
            per_row = 2 * (3 * heads.dk * heads.dv + CHUNK * (3 * heads.dk + 2 * heads.dv))
        total += count * heads.hv * per_row
    return total


def _scene(heads: _Heads, rows: list[_Rows], dtype: torch.dtype, device: torch.device) -> _Scene:
    generator = torch.Generator(device).manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=device)

    n, hv, dk, dv = len(rows), heads.hv, heads.dk, heads.dv
    params = GdnParams(
        conv=normal(TAPS, heads.conv_dim) * 0.5,
        # From nearly none to strong decay.
        decay=-0.01 - 4 * uniform(hv),
        dt_bias=normal(hv) * 0.5,
        norm=1 + normal(dv) * 0.1,
        key_heads=heads.hk,
        value_heads=hv,
        key_width=dk,
        value_width=dv,
        eps=1e-6,
    )
    places = sum(r.count - 1 for r in rows if r.mode == "snapshot")
    saves = sum(len(r.saves) for r in rows)
    gates = torch.stack((-uniform(n, DRAFTS, hv), uniform(n, DRAFTS, hv)), dim=2)
    state = GdnState(
        h=normal(n, hv, dk, dv) * 0.3,
        conv=normal(n, heads.conv_dim, TAPS).to(dtype).float(),
        ring_inputs=normal(n, DRAFTS, heads.conv_dim).to(dtype).float(),
        ring_gates=gates,
        snapshot_h=normal(places, hv, dk, dv),
        snapshot_conv=normal(n if places else 0, DRAFTS + 1, heads.conv_dim, TAPS),
        saved_h=normal(saves, hv, dk, dv),
        saved_conv=normal(saves, heads.conv_dim, TAPS).to(dtype).float(),
    )
    batch = _batch(rows, device)
    return _Scene(normal(len(batch.positions), heads.columns).to(dtype), params, state, batch)


def _batch(sequences: list[_Rows], device: torch.device) -> RaggedBatch:
    parts, taken, saved = [], 0, 0
    for slot, r in enumerate(sequences):
        parts.append(
            Rows(
                slot,
                r.start,
                r.count,
                r.committed,
                r.pending,
                chunked=r.mode == "chunked",
                ring=r.ring,
                snapshot=taken if r.mode == "snapshot" else -1,
                saves=tuple((rows, saved + i) for i, rows in enumerate(r.saves)),
            )
        )
        taken += r.count - 1 if r.mode == "snapshot" else 0
        saved += len(r.saves)
    return ragged_batch(parts, [[0]] * len(parts), device)
