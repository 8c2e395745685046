"""Cases of silu_mul: odd widths, and on a card the MLPs of 0.8B, 27B and 35B-A3B."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kernels.cases import Case, CaseSize
from kernels.silu_mul.naive import silu_mul as naive_silu_mul

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
SMOKE = [(3, 1), (2, 48), (1, 1025), (5, 130)]
# Intermediate sizes of 0.8B, 27B and the shared expert of 35B-A3B.
CARD = [(rows, width) for width in (3584, 17408, 512) for rows in (1, 32, 128, 2048)]


def cases(size: CaseSize, device: torch.device) -> list[Case]:
    """Every shape in bfloat16; the small ones in float32 and float16 too."""
    if size is CaseSize.CARD:
        return [_case(rows, width, torch.bfloat16, device) for rows, width in CARD]
    return [_case(rows, width, dtype, device) for dtype in TOLERANCE for rows, width in SMOKE]


def _case(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Case:
    from kernels.silu_mul.triton import silu_mul

    @cache
    def gate_up() -> Tensor:
        generator = torch.Generator(device).manual_seed(1)
        return (torch.randn(rows, 2 * width, generator=generator, device=device) * 3).to(dtype)

    return Case(
        name=f"rows {rows} width {width}",
        dtype=dtype,
        run=lambda: [silu_mul(gate_up())],
        truth=lambda: [naive_silu_mul(gate_up().double())],
        step=lambda: silu_mul(gate_up()),
        tolerance=TOLERANCE[dtype],
        bytes=3 * rows * width * dtype.itemsize,
        flops=5 * rows * width,
    )
