"""What the numba mixer does with rows of one sequence: convolution, norms, state, gated norm.

Arrays are flat, rows of channels padded with zeros to whole vectors.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.curves import silu_of
from kernels.jit import inner, sum_of_squares
from kernels.lanes import (
    COLUMNS,
    NARROW,
    WIDE,
    copy,
    join_columns,
    load32,
    minus,
    plus_product,
    plus_scaled,
    scaled,
    split_columns,
    store,
    times,
    zeros32,
)

_ONE = np.float32(1.0)
_EPS_L2 = np.float32(1e-6)


@inner
def padded(count: Any) -> Any:
    """The next multiple of a vector's width."""
    return (count + WIDE - 1) // WIDE * WIDE


@inner
def clear(x: Any, at: Any, count: Any) -> None:
    """x[at:][:count] = 0; as an assignment it takes longer to compile."""
    for c in range(at, at + count, WIDE):
        store(x, c, zeros32())


@inner
def read_history(conv: Any, at: Any, taps: Any, window: Any, place: Any, width: Any, n: Any) -> Any:
    """The first `taps` rows of the window, n channels from `place` on = conv[at:] [n, taps]."""
    whole = n - n % NARROW if taps == COLUMNS else 0
    for c in range(0, whole, NARROW):
        split_columns(conv, at + c * taps, window, place + c, width)
    for c in range(whole, n):
        for tap in range(taps):
            copy(conv, at + c * taps + tap, window, tap * width + place + c, 1)


@inner
def write_history(
    window: Any, place: Any, width: Any, conv: Any, at: Any, taps: Any, n: Any
) -> Any:
    """conv[at:] [n, taps] = n channels of `taps` rows of the window, the first at `place`."""
    whole = n - n % NARROW if taps == COLUMNS else 0
    for c in range(0, whole, NARROW):
        join_columns(window, place + c, width, conv, at + c * taps)
    for c in range(whole, n):
        for tap in range(taps):
            copy(window, tap * width + place + c, conv, at + c * taps + tap, 1)


@inner
def convolve(window: Any, weights: Any, taps: Any, width: Any, rows: Any, out: Any) -> None:
    """out [rows, width] = the sums over taps that end at each row behind the window's history."""
    for c in range(0, width, WIDE):
        for row in range(rows):
            total = zeros32()
            for tap in range(taps):
                values = load32(window, (row + 1 + tap) * width + c)
                total = plus_product(total, load32(weights, tap * width + c), values)
            store(out, row * width + c, total)


@inner
def silu(x: Any, count: Any) -> None:
    """x[:count] times its sigmoid; whole vectors of it."""
    for c in range(0, count, WIDE):
        store(x, c, silu_of(load32(x, c)))


@inner
def normalise(x: Any, at: Any, count: Any, divisor: Any) -> None:
    """x[at:][:count] becomes as long as 1 / divisor."""
    scale = _ONE / np.sqrt(sum_of_squares(x, at, count) + _EPS_L2) / divisor
    for c in range(at, at + count, WIDE):
        store(x, c, scaled(load32(x, c), scale))


@inner
def gated_norm(
    read: Any, at: Any, z: Any, z_at: Any, norm: Any, eps: Any, dv: Any, count: Any
) -> None:
    """read becomes norm * read / rms(read) * z, where z already is a silu; count is dv padded."""
    mean = sum_of_squares(read, at, count) / np.float32(dv)
    inverse = _ONE / np.sqrt(mean + eps)
    for c in range(0, count, WIDE):
        normed = times(load32(norm, c), scaled(load32(read, at + c), inverse))
        store(read, at + c, times(normed, load32(z, z_at + c)))


@inner
def correct(v: Any, at: Any, read: Any, beta: Any, count: Any) -> None:
    """v becomes beta * (v - read): what a row adds along its key."""
    for c in range(0, count, WIDE):
        store(v, at + c, scaled(minus(load32(v, at + c), load32(read, c)), beta))


@inner
def sweep(
    source: Any,
    source_at: Any,
    target: Any,
    target_at: Any,
    dk: Any,
    stride: Any,
    mixed: Any,
    key_at: Any,
    add_at: Any,
    query_at: Any,
    out: Any,
    out_at: Any,
    decay: Any,
    next_at: Any,
    key_read: Any,
) -> None:
    """One pass over a state [Dk, stride]: what ends a row, what begins the next one, or both.

    An end adds key x correction and reads at the query into out; a beginning decays and reads at
    the next key into key_read. Places are in `mixed`; None for add_at, query_at or decay leaves
    that part out.
    """
    for j in range(0, stride, WIDE):
        if add_at is not None:
            added = load32(mixed, add_at + j)
        found = zeros32()
        next_found = zeros32()
        for i in range(dk):
            row = load32(source, source_at + i * stride + j)
            if add_at is not None:
                row = plus_scaled(row, added, mixed, key_at + i)
            if query_at is not None:
                found = plus_scaled(found, row, mixed, query_at + i)
            if decay is not None:
                row = scaled(row, decay)
                next_found = plus_scaled(next_found, row, mixed, next_at + i)
            store(target, target_at + i * stride + j, row)
        if query_at is not None:
            store(out, out_at + j, found)
        if decay is not None:
            store(key_read, j, next_found)
