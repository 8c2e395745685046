"""Products of a bfloat16 matrix with one to four rows, or up to 32, in numba.

Where the CPU multiplies bytes, matrices and rows are rounded to them, as nowhere else, and where it
multiplies bfloat16, rows are: a draft's bits decide nothing, the target verifies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from kernels.cpu_features import BFLOAT16, BYTE_TILES, BYTES, TILE_ROW_BYTES, TILE_ROWS
from kernels.draft_chain.tile import AT_ONCE, HEIGHT, multiply, multiply_many
from kernels.jit import inline
from kernels.tile_registers import release_registers, shape_registers, usable, whole_registers
from kernels.tiles import LANES, in_tiles

# Rows that one call of `products` takes: with four the CPU multiplies as fast as it can.
BLOCK = 4
# Rows that one call of `block_products` takes where takes_many.
MANY = HEIGHT * TILE_ROWS
# The largest of a row of bytes; in a matrix they are stored with 128 more, as unsigned ones.
_TOP = 127
# A row that is all zeros is scaled as if this were its largest.
_SMALLEST = 1e-30


def fast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a kernel whose sums may be re-associated; cached on disk."""
    flags = {"reassoc", "contract", "nsz"}
    compiled: Callable[..., Any] = numba.njit(
        cache=True, error_model="numpy", fastmath=flags, inline="never"
    )(function)
    return compiled


def in_byte_tiles(matrix: Tensor) -> Tensor:
    """A copy of [N, K] as `byte_products` reads it, each row rounded to 255 steps of its own.

    Returns [N / LANES, K / 4 + 1, LANES] int32: fours of unsigned bytes, each 128 more than its
    number, then the float32 scales of the rows. N must be a whole number of LANES and K of fours.
    """
    rows, columns = matrix.shape
    numbers = matrix.float()
    largest = torch.linalg.vector_norm(numbers, torch.inf, 1, keepdim=True)
    scales = largest.clamp(min=_SMALLEST) / _TOP
    stored = numbers.div_(scales).round_().add_(_TOP + 1).to(torch.uint8)
    fours = stored.reshape(rows // LANES, LANES, columns // 4, 4).transpose(1, 2)
    words = fours.contiguous().view(torch.int32).squeeze(-1)
    return torch.cat([words, scales.view(torch.int32).reshape(-1, 1, LANES)], 1)


@inline
def wide(stored: Any) -> Any:
    """A bfloat16, seen as uint16, as a float32."""
    return np.uint32(np.uint32(stored) << np.uint32(16)).view(np.float32)


@fast
def _rounded(x: Any, rows: Any) -> Any:
    """[BLOCK, K / 2] pairs of bfloat16 nearest to x [BLOCK, K]."""
    stored = np.empty(x.shape, np.uint16)
    for r in range(rows):
        for k in range(x.shape[1]):
            bits = np.float32(x[r, k]).view(np.uint32)
            tie = (bits >> np.uint32(16)) & np.uint32(1)
            stored[r, k] = np.uint16((bits + np.uint32(0x7FFF) + tie) >> np.uint32(16))
    return stored.view(np.uint32)


@fast
def quantised(x: Any, rows: Any) -> Any:
    """[BLOCK, K / 4 + 2] int32 of x [BLOCK, K]: fours of signed bytes, in steps of each row's own.

    Behind them the sum of the row's bytes times -128, which takes away what the matrix's bytes are
    stored with, and the row's float32 scale.
    """
    width = x.shape[1]
    words = np.empty((x.shape[0], width // 4 + 2), np.int32)
    for r in range(rows):
        # As integers: a maximum of floats would not vectorise.
        top = np.float32(_SMALLEST).view(np.uint32)
        for k in range(width):
            size = np.uint32(np.float32(x[r, k]).view(np.uint32) & np.uint32(0x7FFFFFFF))
            top = np.uint32(max(top, size))
        largest = np.uint32(top).view(np.float32)
        inverse = np.float32(_TOP) / largest
        stored = words[r].view(np.int8)
        total = np.int32(0)
        for k in range(width):
            number = np.int32(np.floor(x[r, k] * inverse + np.float32(0.5)))
            stored[k] = np.int8(number)
            total = np.int32(total + number)
        words[r, width // 4] = np.int32(-128) * total
        words[r, width // 4 + 1] = np.float32(largest / np.float32(_TOP)).view(np.int32)
    return words


@fast
def _multiply_all(weight: Any, x: Any, rows: Any, out: Any) -> None:
    done = 0
    if rows == 1:
        while done < weight.shape[0]:
            done += multiply(weight, done, x, 1, out)
    elif rows == 2:
        while done < weight.shape[0]:
            done += multiply(weight, done, x, 2, out)
    else:
        while done < weight.shape[0]:
            done += multiply(weight, done, x, 4, out)


@fast
def exact_products(weight: Any, x: Any, rows: Any, out: Any) -> None:
    """out [BLOCK, N] = x [BLOCK, K] times weight (see in_tiles) transposed, the first `rows`.

    With three rows the fourth is multiplied too.
    """
    _multiply_all(weight, x, rows, out)


@fast
def rounded_products(weight: Any, x: Any, rows: Any, out: Any) -> None:
    """As exact_products, with x rounded to bfloat16; sums are in float32."""
    _multiply_all(weight, _rounded(x, rows), rows, out)


@fast
def byte_products(weight: Any, x: Any, rows: Any, out: Any) -> None:
    """As exact_products of in_byte_tiles, with x rounded as they are; sums are in int32."""
    _multiply_all(weight, quantised(x, rows), rows, out)


def takes_many(*widths: int) -> bool:
    """Whether `block_products` takes MANY rows of x of these widths, on this machine."""
    return BYTE_TILES and usable() and all(width % TILE_ROW_BYTES == 0 for width in widths)


_WHOLE = whole_registers()


@fast
def many_byte_products(weight: Any, x: Any, rows: Any, out: Any) -> None:
    """As byte_products, of x [MANY, K] into out [MANY, N], where takes_many(K).

    The sums are the same; their two scales may be multiplied first. Behind `rows` anything is left.
    """
    words = quantised(x, rows)
    sums = np.empty((TILE_ROWS, LANES), np.int32)
    shape_registers(_WHOLE, 0)
    for first in range(0, weight.shape[0], AT_ONCE):
        multiply_many(weight, first, words, sums, out)
    release_registers()


products = byte_products if BYTES else rounded_products if BFLOAT16 else exact_products
_many_products = many_byte_products if BYTE_TILES else products
in_form = in_byte_tiles if BYTES else in_tiles


@fast
def block_products(weight: Any, x: Any, rows: Any, out: Any) -> None:
    """As `products`, of x [BLOCK, K] or, where takes_many(K), [MANY, K]."""
    if x.shape[0] == BLOCK:
        products(weight, x, rows, out)
    else:
        _many_products(weight, x, rows, out)
