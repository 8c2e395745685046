"""Weights on the model's device, a layer at a time. Knows no packed form."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from engine.weights.layout import LayerWeights, MtpWeights, WeightSource

T = TypeVar("T")


class PlacedWeights:
    """A source whose tensors come out on `device`, whatever device they were read to."""

    def __init__(self, source: WeightSource, device: torch.device) -> None:
        self._source = source
        self._device = device

    def embed(self) -> Tensor:
        """See WeightSource."""
        return self._source.embed().to(self._device)

    def norm(self) -> Tensor:
        """See WeightSource."""
        return self._source.norm().to(self._device)

    def lm_head(self) -> Tensor | None:
        """See WeightSource."""
        return placed(self._source.lm_head(), self._device)

    def layer(self, index: int) -> LayerWeights:
        """See WeightSource."""
        return placed(self._source.layer(index), self._device)

    def mtp(self) -> MtpWeights | None:
        """See WeightSource."""
        return placed(self._source.mtp(), self._device)


def placed(weights: T, device: torch.device) -> T:
    """The same weights with every tensor on the device, in nested dataclasses too."""
    value: Any = weights
    if isinstance(value, Tensor):
        return value.to(device)  # type: ignore[return-value]
    if not is_dataclass(value) or isinstance(value, type):
        return weights
    moved = {field.name: placed(getattr(value, field.name), device) for field in fields(value)}
    return replace(value, **moved)  # type: ignore[return-value]
