"""How the drafter's matrices are stored on this CPU. Plans ask too: no numba and no torch here."""

from __future__ import annotations

from kernels.cpu_features import BYTES


def tile_parts(rows: int, columns: int) -> tuple[tuple[str, int, int], ...]:
    """What a matrix [N, K] takes in tiles: (of which kind, how many, bytes each)."""
    if BYTES:
        return ("matrices", rows * columns, 1), ("scales", rows, 4)
    return (("matrices", rows * columns, 2),)
