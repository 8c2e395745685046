"""The truth, in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

MoveRows = Callable[[Sequence[Tensor], Sequence[Tensor], Tensor, Tensor], None]


def move_rows(
    sources: Sequence[Tensor], targets: Sequence[Tensor], src: Tensor, dst: Tensor
) -> None:
    """targets[i][:, dst] = sources[i][:, src] for every pair of tensors.

    Args:
        sources: tensors [L, S, ...]; all have the same L, each its own S and row.
        targets: one for each source, of the same dtype and row; it may be the same tensor.
        src, dst: [n] int64 rows; no row of `dst` is twice there, nor in `src` of the same tensor.
    """
    for source, target in zip(sources, targets, strict=True):
        target[:, dst] = source[:, src]
