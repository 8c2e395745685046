"""What the numba kernels share: how they are compiled, and a float32 exp that vectorises.

Contraction to fused multiply-adds is allowed, re-association is not: every row then goes through
the same operations in the same order whatever the batch is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from torch import Tensor

from kernels.lanes import (
    NARROW,
    WIDE,
    load16,
    load32,
    number,
    plus_product,
    put,
    scaled,
    store,
    sum_of,
    times,
    zeros32,
)

# workqueue costs twice as much beside torch's own threads; libgomp is there wherever torch is.
numba.config.THREADING_LAYER = "omp"

# error_model="numpy": the default checks every division for zero, which stops vectorisation
# (3.1 ns instead of 0.36 ns for a silu).
_OPTIONS: dict[str, Any] = {"cache": True, "fastmath": {"contract"}, "error_model": "numpy"}


def parallel_kernel(function: Callable[..., None]) -> Callable[..., None]:
    """Compile a kernel whose `prange` loops run on numba's threads; cached on disk."""
    compiled: Callable[..., None] = numba.njit(parallel=True, **_OPTIONS)(function)
    return compiled


def host(tensor: Tensor) -> Any:
    """The numpy view of a tensor that lives on (parameters, pools), made once and kept with it.

    A call takes 0.1 us where Tensor.numpy takes 0.5, and a narrow step makes a hundred of them.
    """
    kept = tensor.__dict__
    array = kept.get("_host_view")
    if array is None:
        array = kept["_host_view"] = tensor.numpy()
    return array


# For a few lines: left to itself LLVM calls many of them, at 20 to 60 ns a call.
inline = numba.njit(error_model="numpy", fastmath={"contract"}, forceinline=True)
# As inline, but Python itself cannot call it: quicker to compile, the more so the more arguments.
inner = numba.njit(
    error_model="numpy", fastmath={"contract"}, no_cpython_wrapper=True, no_cfunc_wrapper=True
)

# Range reduction and polynomial of Cephes' expf: exp(x) = 2^n * P(x - n ln 2), error 2 ulp.
LOG2E = np.float32(1.44269504088896341)
LN2_HIGH = np.float32(0.693359375)
LN2_LOW = np.float32(-2.12194440e-4)
EXP_TERMS = tuple(
    np.float32(term)
    for term in (
        1.9875691500e-4,
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
    )
)
_P0, _P1, _P2, _P3, _P4, _P5 = EXP_TERMS
_ONE = np.float32(1.0)
_HALF = np.float32(0.5)
EXP_LEAST = np.float32(-87.0)
EXP_MOST = np.float32(88.0)


@inline
def exp32(x: Any) -> Any:
    """exp of a float32, clamped to exp(-87) .. exp(88); no call, so loops over it vectorise."""
    x = min(max(x, EXP_LEAST), EXP_MOST)
    n = np.floor(x * LOG2E + _HALF)
    r = x - n * LN2_HIGH - n * LN2_LOW
    p = _P0
    p = p * r + _P1
    p = p * r + _P2
    p = p * r + _P3
    p = p * r + _P4
    p = p * r + _P5
    p = p * (r * r) + r + _ONE
    return p * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


@inline
def sigmoid32(x: Any) -> Any:
    """1 / (1 + exp(-x)) in float32."""
    return _ONE / (_ONE + exp32(-x))


@inline
def sum_of_squares(x: Any, at: Any, count: Any) -> Any:
    """Of x[at:][:count], flat and contiguous, in lanes, so that it has one fixed order.

    A slice of its own would be counted in and out, which takes longer than a short row's sum. Two
    registers take as long as one: each addition waits for the one before.
    """
    wide, whole = at + count // WIDE * WIDE, at + count // NARROW * NARROW
    pairs = zeros32()
    for c in range(at, wide, WIDE):
        two = load32(x, c)
        pairs = plus_product(pairs, two, two)
    total = sum_of(pairs)
    if wide < whole:
        last = load16(x, wide)
        total += sum_of(times(last, last))
    for c in range(whole, at + count):
        total += number(x, c) * number(x, c)
    return total


@inline
def scale_row(x: Any, at: Any, factor: Any, scale: Any, out: Any, out_at: Any) -> None:
    """out[out_at:] = x[at:] times a factor times scale, both flat; as many as scale [H] has."""
    count = scale.shape[0]
    whole = count // NARROW * NARROW
    for c in range(0, whole, NARROW):
        store(out, out_at + c, times(scaled(load16(x, at + c), factor), load16(scale, c)))
    for c in range(whole, count):
        put(out, out_at + c, number(x, at + c) * factor * scale[c])
