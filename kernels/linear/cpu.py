"""Packed linears for a CPU whose rows are bitwise the same at every batch size.

Bfloat16 weights in tiles where the CPU multiplies tiles (amx.py); fp16 weights with float32 sums
(FBGEMM) where the checkpoint's numbers are exact in fp16, if need be after scaling by a power of
two; packed float32 (oneDNN) elsewhere. Timings in docs/performance.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.linear import amx
from kernels.tile_registers import usable

_FP16_MAX = 65504.0
# The overloads themselves: through the packet every call costs 5 us more.
_linear_fp16 = torch.ops.quantized.linear_dynamic_fp16.default
_linear_float32 = torch.ops.mkldnn._linear_pointwise.default


@dataclass(frozen=True, slots=True)
class Fp16Linear:
    """FBGEMM fp16 weight [N, K], float32 inputs and sums.

    `pad` says that this machine's kernels treat a remainder of one or two rows differently, so that
    such batches are padded (M mod 6 in 1, 2 on AVX2; never on AVX-512). `unscale` is the inverse of
    the power of two by which the packed weight was scaled; it goes onto the inputs, which is exact.
    """

    packed: Any
    nbytes: int
    pad: bool
    unscale: float = 1.0
    form: str = "fp16"

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, K] float32 -> [M, N] float32."""
        rows = x.shape[0]
        if self.unscale != 1.0:
            x = x * self.unscale
        if self.pad and rows % 6 in (1, 2):
            padded = torch.nn.functional.pad(x, (0, 0, 0, 3 - rows % 6))
            return _linear_fp16(padded, self.packed)[:rows]  # type: ignore[no-any-return]
        return _linear_fp16(x, self.packed)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Float32Linear:
    """oneDNN-packed float32 weight [N, K]."""

    packed: Tensor
    nbytes: int
    form: str = "float32"

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, K] float32 -> [M, N] float32."""
        return _linear_float32(x, self.packed, None, "none", [], "")  # type: ignore[no-any-return]


def exact_in_fp16(weight: Tensor) -> bool:
    """Whether every number of `weight` survives the way to fp16 and back."""
    return bool((weight.half().to(weight.dtype) == weight).all())


def fp16_scale(weight: Tensor) -> float | None:
    """The power of two that makes weight [N, K] float32 exact in fp16, 1 if it can be; else None.

    A bf16 number is exact down to 2^-17, and trained matrices hold a few that are smaller; scaled
    up to fp16's largest numbers they are exact down to about 2^-33 of the largest.
    """
    if exact_in_fp16(weight):
        return 1.0
    largest = float(weight.abs().max())
    if not 0.0 < largest < math.inf:
        return None
    scale = 2.0 ** math.floor(math.log2(_FP16_MAX / largest))
    return scale if exact_in_fp16(weight * scale) else None


def fp16_rows_vary() -> bool:
    """Whether an fp16 product of one row differs from the same row among three, on this machine."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 96, generator=generator).half().float()
    rows = torch.randn(24, 96, generator=generator)
    linear = Fp16Linear(torch.ops.quantized.linear_prepack_fp16(weight, None), 0, pad=False)
    whole = linear(rows)
    return any(not torch.equal(linear(rows[:m]), whole[:m]) for m in range(1, 24))


def pack(weight: Tensor, pad: bool) -> amx.TileLinear | Fp16Linear | Float32Linear:
    """Pack weight [N, K] (any float dtype) in the smallest exact form, of two the faster.

    `pad` comes from fp16_rows_vary(), asked once per process.
    """
    if amx.fits(weight) and usable():
        return amx.pack(weight)
    full = weight.float()
    scale = fp16_scale(full) if weight.dtype != torch.float32 else None
    if scale is not None:
        packed = torch.ops.quantized.linear_prepack_fp16(full * scale, None)
        return Fp16Linear(packed, weight.numel() * 2, pad, 1.0 / scale)
    packed = torch.ops.mkldnn._reorder_linear_weight(full.contiguous())
    return Float32Linear(packed, weight.numel() * 4)
