"""Products of a bfloat16 matrix with one to four rows, or up to 32, in numba.

Where the CPU multiplies bytes, matrices and rows are rounded to them, as nowhere else, and where it
multiplies bfloat16, rows are: a draft's bits decide nothing, the target verifies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from kernels.cpu_features import BFLOAT16, BYTE_TILES, BYTES, TILE_ROW_BYTES, TILE_ROWS
from kernels.draft_chain.tile import AT_ONCE, HEIGHT, multiply, multiply_many
from kernels.jit import inline
from kernels.lanes import (
    WIDE,
    copy,
    larger,
    largest,
    load32,
    number,
    plus,
    rounded,
    scaled,
    sizes,
    store_bytes,
    sum_of,
    zeros32,
)
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


_FAST: dict[str, Any] = {"error_model": "numpy", "fastmath": {"reassoc", "contract", "nsz"}}


def fast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a kernel whose sums may be re-associated; cached on disk."""
    compiled: Callable[..., Any] = numba.njit(cache=True, inline="never", **_FAST)(function)
    return compiled


def fast_inner(function: Callable[..., Any]) -> Callable[..., Any]:
    """As `fast`, but Python cannot call it: quicker to compile, the more so the more arguments."""
    compiled: Callable[..., Any] = numba.njit(
        inline="never", no_cpython_wrapper=True, no_cfunc_wrapper=True, **_FAST
    )(function)
    return compiled


def in_byte_tiles(matrix: Tensor) -> Tensor:
    """A copy of [N, K] as `products` reads it in bytes, each row rounded to 255 steps of its own.

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


# Rows in the form that products multiply, words [height, .]: made for `width` numbers each, then
# line r filled from x[at:][:width], flat.


@fast
def _exact_rows(height: Any, width: Any) -> Any:
    return np.empty((height, width), np.float32)


@fast
def _take_exact(x: Any, at: Any, width: Any, words: Any, r: Any) -> None:
    copy(x, at, words, r * width, width)


@fast
def _rounded_rows(height: Any, width: Any) -> Any:
    """Pairs of bfloat16."""
    return np.empty((height, width // 2), np.uint32)


@fast
def _take_rounded(x: Any, at: Any, width: Any, words: Any, r: Any) -> None:
    stored = words[r].view(np.uint16)
    for k in range(width):
        bits = np.float32(number(x, at + k)).view(np.uint32)
        tie = (bits >> np.uint32(16)) & np.uint32(1)
        stored[k] = np.uint16((bits + np.uint32(0x7FFF) + tie) >> np.uint32(16))


@fast
def byte_rows(height: Any, width: Any) -> Any:
    """Fours of signed bytes, in steps of each row's own, and two words that `take_bytes` fills."""
    return np.empty((height, width // 4 + 2), np.int32)


@fast
def take_bytes(x: Any, at: Any, width: Any, words: Any, r: Any) -> None:
    """Behind a row's bytes come their sum times -128, which takes away what the matrix's bytes are
    stored with, and its float32 scale.
    """
    # Thirty-two at a time: the longest or the sum of two registers takes as long as that of one.
    whole = width // WIDE * WIDE
    most = zeros32()
    for k in range(at, at + whole, WIDE):
        most = larger(sizes(load32(x, k)), most)
    top = max(largest(most), np.float32(_SMALLEST))
    for k in range(at + whole, at + width):
        top = max(top, abs(number(x, k)))
    inverse = np.float32(_TOP) / top
    stored = r * 4 * words.shape[1]
    totals = zeros32()
    for k in range(0, whole, WIDE):
        numbers = rounded(scaled(load32(x, at + k), inverse))
        totals = plus(totals, numbers)
        store_bytes(words, stored + k, numbers)
    total = sum_of(totals)
    for k in range(whole, width):
        nearest = np.floor(number(x, at + k) * inverse + np.float32(0.5))
        store_bytes(words, stored + k, nearest)
        total += nearest
    words[r, width // 4] = np.int32(-128) * np.int32(total)
    words[r, width // 4 + 1] = np.float32(top / np.float32(_TOP)).view(np.int32)


@fast
def products(weight: Any, words: Any, rows: Any, out: Any) -> None:
    """out [BLOCK, N] = the first `rows` of x, in their form, times the matrix in its own.

    With three rows the fourth is multiplied too.
    """
    done = 0
    if rows == 1:
        while done < weight.shape[0]:
            done += multiply(weight, done, words, 1, out)
    elif rows == 2:
        while done < weight.shape[0]:
            done += multiply(weight, done, words, 2, out)
    else:
        while done < weight.shape[0]:
            done += multiply(weight, done, words, 4, out)


def takes_many(*widths: int) -> bool:
    """Whether `block_products` takes MANY rows of x of these widths, on this machine."""
    return BYTE_TILES and usable() and all(width % TILE_ROW_BYTES == 0 for width in widths)


_WHOLE = whole_registers()


@fast
def many_products(weight: Any, words: Any, rows: Any, out: Any) -> None:
    """As `products` in bytes, of words [MANY, .] into out [MANY, N], where takes_many(K).

    The sums are the same; their two scales may be multiplied first. Behind `rows` anything is left.
    """
    sums = np.empty((TILE_ROWS, LANES), np.int32)
    shape_registers(_WHOLE, 0)
    for first in range(0, weight.shape[0], AT_ONCE):
        multiply_many(weight, first, words, sums, out)
    release_registers()


_many = many_products if BYTE_TILES else products


@fast
def block_products(weight: Any, words: Any, rows: Any, out: Any) -> None:
    """As `products`, of words [BLOCK, .] or, where takes_many(K), [MANY, .]."""
    if words.shape[0] == BLOCK:
        products(weight, words, rows, out)
    else:
        _many(weight, words, rows, out)


@dataclass(frozen=True)
class Form:
    """How matrices and rows are stored.

    Attributes:
        matrix: makes a copy of a bfloat16 matrix [N, K].
        rows: (height, width) -> words for so many rows.
        take: (x, at, width, words, r) puts x[at:][:width], flat, into line r of them.
    """

    matrix: Callable[[Tensor], Tensor]
    rows: Callable[..., Any]
    take: Callable[..., None]


EXACT = Form(in_tiles, _exact_rows, _take_exact)
ROUNDED = Form(in_tiles, _rounded_rows, _take_rounded)
IN_BYTES = Form(in_byte_tiles, byte_rows, take_bytes)
FORM = IN_BYTES if BYTES else ROUNDED if BFLOAT16 else EXACT
