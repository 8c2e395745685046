"""What the Triton tests share: the device that they run on, and outputs full of NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every float tensor that is allocated without contents holds NaN, every integer one -77.

    So that a kernel that leaves an element out, or reads one that nobody wrote, is seen.
    """

    def poison(tensor: Tensor) -> Tensor:
        return tensor.fill_(float("nan") if tensor.is_floating_point() else -77)

    empty, empty_like, new_empty = torch.empty, torch.empty_like, Tensor.new_empty

    def filled(make: Any) -> Any:
        return lambda *args, **kwargs: poison(make(*args, **kwargs))

    monkeypatch.setattr(torch, "empty", filled(empty))
    monkeypatch.setattr(torch, "empty_like", filled(empty_like))
    monkeypatch.setattr(Tensor, "new_empty", filled(new_empty))
