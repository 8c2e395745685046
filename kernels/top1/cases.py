"""Cases of top1: pieces that are full and not, and on a card the vocabulary of all three models."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kernels.cases import Case, CaseSize
from kernels.top1.naive import top1 as naive_top1

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-5, torch.float16: 1e-5}
SMOKE = [(3, 1), (2, 97), (1, 2048), (4, 5000)]
VOCABULARY = 248_320


def cases(size: CaseSize, device: torch.device) -> list[Case]:
    """The sums are float32 whatever the logits are, and so is the tolerance."""
    if size is CaseSize.CARD:
        return [
            _case(rows, VOCABULARY, dtype, device)
            for dtype in (torch.float32, torch.bfloat16)
            for rows in (1, 8, 32, 128)
        ]
    return [_case(rows, width, dtype, device) for dtype in TOLERANCE for rows, width in SMOKE]


def _case(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Case:
    from kernels.top1.triton import top1

    @cache
    def logits() -> Tensor:
        generator = torch.Generator(device).manual_seed(1)
        return (torch.randn(rows, width, generator=generator, device=device) * 3).to(dtype)

    def truth() -> list[Tensor]:
        # argmax of equal logits may be any of them; the lowest id is the contract.
        wide = logits().double()
        best = wide.max(-1, keepdim=True).values
        ids = torch.arange(width, device=device).expand_as(wide)
        lowest = torch.where(wide == best, ids, width).min(-1).values
        return [lowest, naive_top1(wide)[1]]

    return Case(
        name=f"rows {rows} vocabulary {width}",
        dtype=dtype,
        run=lambda: list(top1(logits())),
        truth=truth,
        step=lambda: top1(logits()),
        tolerance=TOLERANCE[dtype],
        bytes=rows * width * dtype.itemsize + 12 * rows,
        flops=3 * rows * width,
    )
