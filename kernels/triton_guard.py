"""What every Triton kernel checks before a launch; knows dtypes and devices, not operators."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.errors import UnsupportedKernelError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DTYPE_NAMES = "float32, bfloat16 and float16"


def runs_on(device: torch.device) -> bool:
    """Whether Triton kernels run there: on CUDA, and anywhere under its interpreter."""
    return device.type == "cuda" or bool(triton.knobs.runtime.interpret)


def dot_dtype(dtype: torch.dtype) -> Any:
    """The Triton dtype of both sides of a product of tensors of `dtype`.

    The interpreter multiplies bfloat16 operands as the integers it keeps them in (triton 3.9), so
    that they are widened there; the products are the same, since float32 holds them exactly.
    """
    if dtype == torch.bfloat16 and triton.knobs.runtime.interpret:
        return tl.float32
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[
        dtype
    ]


def guard(operator: str, x: Tensor, size: int, largest: int, what: str) -> None:
    """Refuse a tensor that the operator has no kernel for.

    Args:
        operator: its name, for the message.
        x: a tensor of the activations' dtype and device.
        size: the length that the kernel holds in one block; `what` says which one it is.
        largest: the largest such length.

    Raises:
        UnsupportedKernelError: names dtype, size and device, and what is supported.
    """
    if x.dtype in DTYPES and 0 < size <= largest and runs_on(x.device):
        return
    raise UnsupportedKernelError(
        operator,
        x.dtype,
        size,
        str(x.device),
        f"{DTYPE_NAMES}, {what} from 1 to {largest}, on CUDA or with TRITON_INTERPRET=1",
    )
