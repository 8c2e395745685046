"""Packed linears for a CPU whose rows are bitwise the same at every batch size.

fp16 weights with float32 sums (FBGEMM) where the checkpoint's numbers are exact in fp16, packed
float32 (oneDNN) elsewhere. Timings in docs/performance.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Fp16Linear:
    """FBGEMM fp16 weight [N, K], float32 inputs and sums.

    `pad` says that this machine's kernels treat a remainder of one or two rows differently, so that
    such batches are padded (M mod 6 in 1, 2 on AVX2; never on AVX-512).
    """

    packed: Any
    nbytes: int
    pad: bool
    form: str = "fp16"

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, K] float32 -> [M, N] float32."""
        rows = x.shape[0]
        if self.pad and rows % 6 in (1, 2):
            padded = torch.nn.functional.pad(x, (0, 0, 0, 3 - rows % 6))
            return torch.ops.quantized.linear_dynamic_fp16(padded, self.packed)[:rows]  # type: ignore[no-any-return]
        return torch.ops.quantized.linear_dynamic_fp16(x, self.packed)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Float32Linear:
    """oneDNN-packed float32 weight [N, K]."""

    packed: Tensor
    nbytes: int
    form: str = "float32"

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, K] float32 -> [M, N] float32."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, None, "none", [], "")  # type: ignore[no-any-return]


def exact_in_fp16(weight: Tensor) -> bool:
    """Whether every number of `weight` survives the way to fp16 and back."""
    return bool((weight.half().to(weight.dtype) == weight).all())


def fp16_rows_vary() -> bool:
    """Whether an fp16 product of one row differs from the same row among three, on this machine."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 96, generator=generator).half().float()
    rows = torch.randn(24, 96, generator=generator)
    linear = Fp16Linear(torch.ops.quantized.linear_prepack_fp16(weight, None), 0, pad=False)
    whole = linear(rows)
    return any(not torch.equal(linear(rows[:m]), whole[:m]) for m in range(1, 24))


def pack(weight: Tensor, pad: bool) -> Fp16Linear | Float32Linear:
    """Pack weight [N, K] (any float dtype) in the smallest exact form.

    `pad` comes from fp16_rows_vary(), asked once per process.
    """
    full = weight.float()
    if weight.dtype != torch.float32 and exact_in_fp16(full):
        packed = torch.ops.quantized.linear_prepack_fp16(full, None)
        return Fp16Linear(packed, weight.numel() * 2, pad)
    packed = torch.ops.mkldnn._reorder_linear_weight(full.contiguous())
    return Float32Linear(packed, weight.numel() * 4)
