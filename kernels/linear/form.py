"""How a float32 is taken apart for matrix registers. Plans ask too: no numba and no torch here."""

from __future__ import annotations

from kernels.cpu_features import TILES

# Bfloat16 that a number is the sum of.
PIECES = 2
# A tile register: rows, and columns in bfloat16.
ROWS, COLUMNS = 16, 32
_BFLOAT16_BYTES = 2


def pieces_shape(rows: int, columns: int) -> tuple[int, int, int, int, int]:
    """Of x [rows, columns] in pieces: blocks of rows, steps of columns, piece by piece."""
    return -(-rows // ROWS), columns // COLUMNS, PIECES, ROWS, COLUMNS


def scratch_bytes(rows: int, columns: int) -> int:
    """What a product of x [rows, columns] takes beside x and its result, on this CPU."""
    if not TILES:
        return 0
    blocks, steps, *tile = pieces_shape(rows, columns)
    return blocks * steps * tile[0] * tile[1] * tile[2] * _BFLOAT16_BYTES
