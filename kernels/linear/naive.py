"""The truth: torch's own linear on the unpacked weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """weight [N, K] in the activation dtype."""

    weight: Tensor
    form: str = "plain"

    @property
    def nbytes(self) -> int:
        """Bytes that the weight occupies."""
        return self.weight.numel() * self.weight.element_size()

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, K] -> [M, N]."""
        return torch.nn.functional.linear(x, self.weight)


def pack(weight: Tensor, dtype: torch.dtype) -> PlainLinear:
    """Hold weight [N, K] in the activation dtype."""
    return PlainLinear(weight.to(dtype))
