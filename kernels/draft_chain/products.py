"""Products of a bfloat16 matrix with one to four rows, in numba.

Where the CPU multiplies bfloat16, rows are rounded to it, as nowhere else: a draft's bits decide
nothing, the target verifies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from kernels.draft_chain.tile import BFLOAT16, LANES, multiply
from kernels.jit import inline

# Rows that one call of `products` takes: with four the CPU multiplies as fast as it can.
BLOCK = 4


def fast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a kernel whose sums may be re-associated; cached on disk."""
    flags = {"reassoc", "contract", "nsz"}
    compiled: Callable[..., Any] = numba.njit(
        cache=True, error_model="numpy", fastmath=flags, inline="never"
    )(function)
    return compiled


def in_tiles(matrix: Tensor) -> Tensor:
    """A copy of [N, K] bfloat16 as `products` reads it: [N / LANES, K / 2, LANES] of column pairs.

    N must be a whole number of LANES and K even.
    """
    rows, columns = matrix.shape
    pairs = matrix.reshape(rows // LANES, LANES, columns // 2, 2).transpose(1, 2)
    return pairs.contiguous().view(torch.uint32).squeeze(-1)


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


products = rounded_products if BFLOAT16 else exact_products
