"""A matrix in tiles of sixteen rows, as loops read it that sum up in a register's lanes."""

from __future__ import annotations

import torch
from torch import Tensor

# Rows of the matrix in a tile.
LANES = 16


def in_tiles(matrix: Tensor, lanes: int = LANES) -> Tensor:
    """A copy of [N, K] bfloat16 in tiles: [N / lanes, K / 2, lanes] uint32, pairs of columns.

    N must be a whole number of lanes and K even.
    """
    rows, columns = matrix.shape
    pairs = matrix.reshape(rows // max(1, lanes), lanes, columns // 2, 2).transpose(1, 2)
    return pairs.contiguous().view(torch.uint32).squeeze(-1)
