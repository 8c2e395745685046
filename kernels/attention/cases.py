"""Cases of the attention mixer: small mixed steps, and on a card the layers of 0.8B and 27B."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kernels.attention.naive import attention_mixer as naive_mixer
from kernels.attention.types import AttentionParams, KvPages
from kernels.batch import RaggedBatch
from kernels.cases import Case, CaseSize
from kernels.ragged import Rows, ragged_batch

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
PAGE = 64


@dataclass(frozen=True, slots=True)
class _Heads:
    """nH, nKV, hd and how many dimensions RoPE turns."""

    name: str
    heads: int
    kv_heads: int
    width: int
    rotary: int


@dataclass(frozen=True, slots=True)
class _Rows:
    """`count` rows behind `cached` tokens, of a prompt when `chunked`."""

    cached: int
    count: int
    chunked: bool = False


SMALL = _Heads("heads 6 over 2 of 32", 6, 2, 32, 8)
MODELS = [_Heads("0.8B", 8, 2, 256, 64), _Heads("27B", 24, 4, 256, 64)]
SMOKE = {
    "decode": [_Rows(0, 1), _Rows(63, 1), _Rows(300, 1)],
    "verify": [_Rows(126, 4), _Rows(9, 2)],
    "prefill beside decode": [_Rows(64, 20, True), _Rows(200, 3), _Rows(0, 3, True)],
}


def cases(size: CaseSize, device: torch.device) -> list[Case]:
    """SMOKE in float32 and bfloat16; CARD in bfloat16: decode, verify of 4 rows, prompt chunks."""
    if size is CaseSize.SMOKE:
        return [
            _case(SMALL, name, rows, dtype, device)
            for dtype in TOLERANCE
            for name, rows in SMOKE.items()
        ]
    return [
        _case(model, name, rows, torch.bfloat16, device)
        for model in MODELS
        for name, rows in _card_steps().items()
    ]


def _card_steps() -> dict[str, list[_Rows]]:
    steps = {}
    for sequences, keys in ((1, 1024), (1, 4096), (16, 1024), (16, 4096), (32, 2048), (128, 1024)):
        steps[f"decode {sequences} x {keys} keys"] = [_Rows(keys - 1, 1)] * sequences
    for sequences, keys in ((1, 4096), (16, 4096), (32, 2048)):
        steps[f"verify 4 {sequences} x {keys} keys"] = [_Rows(keys - 4, 4)] * sequences
    for cached in (0, 4096):
        steps[f"prefill 512 on {cached}"] = [_Rows(cached, 512, True)]
    return steps


@dataclass(frozen=True, slots=True)
class _Scene:
    """One set of inputs; `pages` is the master copy."""

    qkv: Tensor
    params: AttentionParams
    pages: KvPages
    batch: RaggedBatch


def _case(
    heads: _Heads, name: str, rows: list[_Rows], dtype: torch.dtype, device: torch.device
) -> Case:
    from kernels.attention.triton import attention_mixer

    # One scene is kept per case and not one per call: timing would otherwise measure its making.
    scene = cache(lambda: _scene(heads, rows, dtype, device))

    def run() -> list[Tensor]:
        s = scene()
        pages = KvPages(s.pages.k.clone(), s.pages.v.clone())
        return [attention_mixer(s.qkv, s.params, pages, s.batch), pages.k, pages.v]

    def truth() -> list[Tensor]:
        s = scene()
        pages = KvPages(s.pages.k.double(), s.pages.v.double())
        return [naive_mixer(s.qkv.double(), s.params, pages, s.batch), pages.k, pages.v]

    def step() -> Tensor:
        s = scene()
        return attention_mixer(s.qkv, s.params, s.pages, s.batch)

    return Case(
        name=f"{name}, {heads.name}",
        dtype=dtype,
        run=run,
        truth=truth,
        step=step,
        tolerance=TOLERANCE[dtype],
        bytes=_least_bytes(heads, rows, dtype),
        flops=_flops(heads, rows),
    )


def _least_bytes(heads: _Heads, rows: list[_Rows], dtype: torch.dtype) -> int:
    """Every cached key and value once, qkv once, new keys, values and the result once."""
    own = sum(r.count for r in rows)
    cached = sum(r.cached for r in rows)
    token = 2 * heads.kv_heads * heads.width
    row = 2 * heads.heads * heads.width + token
    return (cached * token + own * (row + token + heads.heads * heads.width)) * dtype.itemsize


def _flops(heads: _Heads, rows: list[_Rows]) -> int:
    """Two products of a query head with every key that its row sees."""
    seen = sum(r.count * r.cached + r.count * (r.count + 1) // 2 for r in rows)
    return 4 * seen * heads.heads * heads.width


def _scene(heads: _Heads, rows: list[_Rows], dtype: torch.dtype, device: torch.device) -> _Scene:
    generator = torch.Generator(device).manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    batch = _batch(rows, device)
    blocks = int(batch.block_tables.max()) + 2
    half = heads.rotary // 2
    longest = max(r.cached + r.count for r in rows)
    frequency = 10000.0 ** (-torch.arange(half, device=device) / half)
    angle = torch.arange(longest, device=device)[:, None] * frequency
    params = AttentionParams(
        q_norm=1 + random(heads.width) * 0.1,
        k_norm=1 + random(heads.width) * 0.1,
        cos=angle.cos(),
        sin=angle.sin(),
        heads=heads.heads,
        kv_heads=heads.kv_heads,
        head_dim=heads.width,
        eps=1e-6,
    )
    pages = KvPages(
        k=random(blocks, heads.kv_heads, heads.width, PAGE).to(dtype),
        v=random(blocks, heads.kv_heads, PAGE, heads.width).to(dtype),
    )
    columns = 2 * (heads.heads + heads.kv_heads) * heads.width
    return _Scene(random(int(batch.row_start[-1]), columns).to(dtype), params, pages, batch)


def _batch(rows: list[_Rows], device: torch.device) -> RaggedBatch:
    """Blocks are dealt out in turns, so that no sequence is in one piece in memory."""
    n = len(rows)
    width = -(-max(r.cached + r.count for r in rows) // PAGE)
    return ragged_batch(
        [Rows(s, r.cached, r.count, chunked=r.chunked) for s, r in enumerate(rows)],
        [range(s, n * width, n) for s in range(n)],
        device,
    )
