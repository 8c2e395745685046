"""Cases of the norms: odd widths, and on a card the hidden sizes of 0.8B, 35B-A3B and 27B."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kernels.cases import Case, CaseSize
from kernels.rms_norm import naive

EPS = 1e-6
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
SMOKE = [(3, 1), (2, 48), (1, 1025), (5, 130)]
CARD = [(rows, width) for width in (1024, 2048, 5120) for rows in (1, 32, 128, 2048)]


def cases(size: CaseSize, device: torch.device) -> list[Case]:
    """With and without an addition, and two rows side by side."""
    dtypes = [torch.bfloat16] if size is CaseSize.CARD else list(TOLERANCE)
    shapes = [(dtype, *s) for dtype in dtypes for s in (CARD if size is CaseSize.CARD else SMOKE)]
    found = [_add(rows, width, dtype, device) for dtype, rows, width in shapes]
    found += [_plain(rows, width, dtype, device) for dtype, rows, width in shapes]
    return found + [_join(rows, width, dtype, device) for dtype, rows, width in shapes]


def _rows(rows: int, width: int, seed: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(rows, width, generator=generator, device=device)


def _scale(width: int, seed: int, device: torch.device) -> Tensor:
    return 1 + 0.1 * _rows(1, width, seed, device)[0]


def _add(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Case:
    from kernels.rms_norm.triton import add_rms_norm

    @cache
    def inputs() -> tuple[Tensor, Tensor, Tensor]:
        residual, delta = (_rows(rows, width, seed, device).to(dtype) for seed in (1, 2))
        return residual, delta, _scale(width, 3, device)

    def run() -> list[Tensor]:
        residual, delta, scale = inputs()
        residual = residual.clone()
        return [add_rms_norm(residual, delta, scale, EPS), residual]

    def truth() -> list[Tensor]:
        residual, delta, scale = (t.double() for t in inputs())
        return [naive.add_rms_norm(residual, delta, scale, EPS), residual]

    return Case(
        name=f"add_rms_norm rows {rows} width {width}",
        dtype=dtype,
        run=run,
        truth=truth,
        step=lambda: add_rms_norm(*inputs(), EPS),
        tolerance=TOLERANCE[dtype],
        bytes=4 * rows * width * dtype.itemsize + 4 * width,
        flops=5 * rows * width,
    )


def _plain(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Case:
    from kernels.rms_norm.triton import rms_norm

    @cache
    def inputs() -> tuple[Tensor, Tensor]:
        return _rows(rows, width, 1, device).to(dtype), _scale(width, 2, device)

    def truth() -> list[Tensor]:
        x, scale = (t.double() for t in inputs())
        return [naive.rms_norm(x, scale, EPS)]

    return Case(
        name=f"rms_norm rows {rows} width {width}",
        dtype=dtype,
        run=lambda: [rms_norm(*inputs(), EPS)],
        truth=truth,
        step=lambda: rms_norm(*inputs(), EPS),
        tolerance=TOLERANCE[dtype],
        bytes=2 * rows * width * dtype.itemsize + 4 * width,
        flops=4 * rows * width,
    )


def _join(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Case:
    from kernels.rms_norm.triton import join_norms

    @cache
    def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        left, right = (_rows(rows, width, seed, device).to(dtype) for seed in (1, 2))
        return left, _scale(width, 3, device), right, _scale(width, 4, device)

    def truth() -> list[Tensor]:
        left, left_scale, right, right_scale = (t.double() for t in inputs())
        return [naive.join_norms(left, left_scale, right, right_scale, EPS)]

    return Case(
        name=f"join_norms rows {rows} width {width}",
        dtype=dtype,
        run=lambda: [join_norms(*inputs(), EPS)],
        truth=truth,
        step=lambda: join_norms(*inputs(), EPS),
        tolerance=TOLERANCE[dtype],
        bytes=4 * rows * width * dtype.itemsize + 8 * width,
        flops=8 * rows * width,
    )
