"""The truth, in torch. Scales arrive ready to multiply: 1 + w is folded at load time."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """x [..., H] any float -> same shape and dtype: x / sqrt(mean(x^2) + eps) * scale.

    In float32, or in float64 when x is that.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * scale).to(x.dtype)


def add_rms_norm(residual: Tensor, delta: Tensor | None, scale: Tensor, eps: float) -> Tensor:
    """residual [R, H] += delta in place (when there is one), then its norm [R, H]."""
    if delta is not None:
        residual += delta
    return rms_norm(residual, scale, eps)


def join_norms(
    left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor, eps: float
) -> Tensor:
    """left, right [R, H] -> [R, 2 H]: each normed with its own scale, side by side."""
    return torch.cat((rms_norm(left, left_scale, eps), rms_norm(right, right_scale, eps)), dim=-1)
