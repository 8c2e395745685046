"""What one check of one kernel is: its own result, the truth, and the least work it could do.

Every operator's folder has a `cases.py` with `cases(size, device)`, which `scripts/gpu_check` and
the kernel tests enumerate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor


class CaseSize(Enum):
    """SMOKE: small enough for the Triton interpreter. CARD: the shapes of 0.8B and 27B models."""

    SMOKE = "smoke"
    CARD = "card"


@dataclass(frozen=True, slots=True)
class Case:
    """One shape of one kernel.

    Attributes:
        name: shape and form, e.g. `decode rows 32 hv 48`.
        dtype: of the activations.
        run: the kernel once on fresh copies of its inputs; everything that it computed or changed.
        truth: the same from `naive.py` in higher precision.
        step: the kernel once, in place, for timing.
        tolerance: largest ||out - truth|| / ||truth|| allowed, over every tensor.
        bytes: least memory traffic of one step.
        flops: floating-point operations of one step.
    """

    name: str
    dtype: torch.dtype
    run: Callable[[], Sequence[Tensor]]
    truth: Callable[[], Sequence[Tensor]]
    step: Callable[[], object]
    tolerance: float
    bytes: int
    flops: int


def relative_error(out: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """The largest ||out - truth|| / ||truth|| over pairs of tensors; NaN counts as infinite."""
    worst = 0.0
    for mine, right in zip(out, truth, strict=True):
        difference = (mine.double() - right.double()).norm()
        error = float(difference / right.double().norm().clamp(min=1e-30))
        worst = max(worst, error if error == error else float("inf"))
    return worst
