"""Products of a bfloat16 matrix with one to four rows, in numba.

Sums are re-associated here, as nowhere else: a draft's bits decide nothing, the target verifies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from kernels.jit import inline

# Rows that one call of `products` takes: four rows times two of the matrix fill the registers, and
# reach 42 GMAC/s on a core where a row alone reaches 25.
BLOCK = 4

_ZERO = np.float32(0.0)


def fast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a kernel whose sums may be re-associated; cached on disk."""
    flags = {"reassoc", "contract", "nsz"}
    compiled: Callable[..., Any] = numba.njit(
        cache=True, error_model="numpy", fastmath=flags, inline="never"
    )(function)
    return compiled


@inline
def wide(stored: Any) -> Any:
    """A bfloat16, seen as uint16, as a float32."""
    return np.uint32(np.uint32(stored) << np.uint32(16)).view(np.float32)


@fast
def _one(weight: Any, x: Any, out: Any) -> None:
    for n in range(weight.shape[0]):
        row = weight[n]
        total = _ZERO
        for k in range(row.shape[0]):
            total += wide(row[k]) * x[0, k]
        out[0, n] = total


@fast
def _two(weight: Any, x: Any, out: Any) -> None:
    first, second = x[0], x[1]
    for n in range(weight.shape[0]):
        row = weight[n]
        a = _ZERO
        b = _ZERO
        for k in range(row.shape[0]):
            w = wide(row[k])
            a += w * first[k]
            b += w * second[k]
        out[0, n] = a
        out[1, n] = b


@fast
def _four(weight: Any, x: Any, out: Any) -> None:
    x0, x1, x2, x3 = x[0], x[1], x[2], x[3]
    even = weight.shape[0] // 2 * 2
    for n in range(0, even, 2):
        upper, lower = weight[n], weight[n + 1]
        a0 = a1 = a2 = a3 = _ZERO
        b0 = b1 = b2 = b3 = _ZERO
        for k in range(upper.shape[0]):
            u = wide(upper[k])
            v = wide(lower[k])
            a0 += u * x0[k]
            a1 += u * x1[k]
            a2 += u * x2[k]
            a3 += u * x3[k]
            b0 += v * x0[k]
            b1 += v * x1[k]
            b2 += v * x2[k]
            b3 += v * x3[k]
        out[0, n], out[1, n], out[2, n], out[3, n] = a0, a1, a2, a3
        out[0, n + 1], out[1, n + 1], out[2, n + 1], out[3, n + 1] = b0, b1, b2, b3
    for n in range(even, weight.shape[0]):
        for r in range(4):
            total = _ZERO
            for k in range(weight.shape[1]):
                total += wide(weight[n, k]) * x[r, k]
            out[r, n] = total


@fast
def products(weight: Any, x: Any, rows: Any, out: Any) -> None:
    """out [BLOCK, N] = x [BLOCK, K] times weight [N, K] transposed, the first `rows` of them.

    With three rows the fourth is multiplied too and must hold numbers.
    """
    if rows == 1:
        _one(weight, x, out)
    elif rows == 2:
        _two(weight, x, out)
    else:
        _four(weight, x, out)
