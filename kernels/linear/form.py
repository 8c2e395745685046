"""How a float32 is taken apart for matrix registers. Plans ask too: no numba and no torch here."""

from __future__ import annotations

from kernels.cpu_features import TILE_ROW_BYTES, TILE_ROWS, TILES

# Bfloat16 that a number is the sum of.
PIECES = 2
_BFLOAT16_BYTES = 2
# Of a tile.
COLUMNS = TILE_ROW_BYTES // _BFLOAT16_BYTES


def pieces_shape(rows: int, columns: int) -> tuple[int, int, int, int, int]:
    """Of x [rows, columns] in pieces: blocks of rows, steps of columns, piece by piece."""
    return -(-rows // TILE_ROWS), columns // COLUMNS, PIECES, TILE_ROWS, COLUMNS


def scratch_bytes(rows: int, columns: int) -> int:
    """What a product of x [rows, columns] takes beside x and its result, on this CPU."""
    if not TILES:
        return 0
    blocks, steps, *tile = pieces_shape(rows, columns)
    return blocks * steps * tile[0] * tile[1] * tile[2] * _BFLOAT16_BYTES
