"""What a kernel says when it is asked for a shape, type or device that it lacks."""

from __future__ import annotations

import torch


class UnsupportedKernelError(ValueError):
    """A kernel lacks this dtype, head size or device; names all three and what is supported."""

    def __init__(
        self, operator: str, dtype: torch.dtype, head_size: int, device: str, supported: str
    ) -> None:
        self.operator = operator
        super().__init__(
            f"{operator} has no kernel for dtype {dtype}, head size {head_size}, device {device}; "
            f"supported: {supported}"
        )
