"""Fused addition and RMSNorm in numba: one pass over each row instead of six over the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from kernels.jit import host, parallel_kernel, scale_row, sum_of_squares
from kernels.lanes import NARROW, load16, number, plus, put, store


@parallel_kernel
def _add_rms_norm(
    residual: Any, delta: Any, has_delta: Any, scale: Any, eps: Any, out: Any
) -> None:
    rows, width = residual.shape
    whole = width // NARROW * NARROW
    for r in prange(rows):
        at = r * width
        if has_delta:
            for i in range(at, at + whole, NARROW):
                store(residual, i, plus(load16(residual, i), load16(delta, i)))
            for i in range(at + whole, at + width):
                put(residual, i, number(residual, i) + number(delta, i))
        mean = sum_of_squares(residual, at, width) / np.float32(width)
        scale_row(residual, at, np.float32(1.0) / np.sqrt(mean + eps), scale, out, at)


def add_rms_norm(residual: Tensor, delta: Tensor | None, scale: Tensor, eps: float) -> Tensor:
    """residual [R, H] float32 += delta in place (when there is one), then its norm [R, H]."""
    out = torch.empty_like(residual)
    other = residual if delta is None else delta
    _add_rms_norm(
        residual.numpy(),
        other.numpy(),
        delta is not None,
        host(scale),
        np.float32(eps),
        out.numpy(),
    )
    return out


@parallel_kernel
def _join_norms(
    left: Any, left_scale: Any, right: Any, right_scale: Any, eps: Any, out: Any
) -> None:
    rows, width = left.shape
    size = np.float32(width)
    for r in prange(rows):
        at = r * width
        inverse = np.float32(1.0) / np.sqrt(sum_of_squares(left, at, width) / size + eps)
        scale_row(left, at, inverse, left_scale, out, 2 * at)
        inverse = np.float32(1.0) / np.sqrt(sum_of_squares(right, at, width) / size + eps)
        scale_row(right, at, inverse, right_scale, out, 2 * at + width)


def join_norms(
    left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor, eps: float
) -> Tensor:
    """As naive.join_norms, float32."""
    out = left.new_empty(left.shape[0], 2 * left.shape[1])
    _join_norms(
        left.numpy(),
        host(left_scale),
        right.numpy(),
        host(right_scale),
        np.float32(eps),
        out.numpy(),
    )
    return out
