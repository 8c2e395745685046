"""Vectors in registers, in small numba kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.jit import inline
from kernels.lanes import (
    COLUMNS,
    NARROW,
    WIDE,
    add_products,
    copy,
    join_columns,
    larger,
    largest,
    load16,
    load32,
    minus,
    plus,
    plus_product,
    plus_scaled,
    scaled,
    split_columns,
    store,
    sum_of,
    times,
    zeros32,
)

Floats = npt.NDArray[np.float32]


def normal(count: int) -> Floats:
    return np.random.default_rng(count).standard_normal(count).astype(np.float32)


@inline
def _arithmetic(x: Any, y: Any, out: Any) -> None:
    a, b = load32(x, 3), load32(y, 1)
    store(out, 0, times(a, b))
    store(out, WIDE, minus(a, b))
    store(out, 2 * WIDE, scaled(a, x[1]))
    store(out, 3 * WIDE, plus_product(a, a, b))
    store(out, 4 * WIDE, plus_scaled(zeros32(), a, y, 2))


def test_arithmetic_is_that_of_numpy_on_flat_places() -> None:
    x, y, out = normal(48), normal(40), np.empty(5 * WIDE + 1, np.float32)
    out[-1] = 7
    # Places are flat whatever the shape.
    _arithmetic(x, y.reshape(2, 20), out)
    a, b = x[3 : 3 + WIDE], y[1 : 1 + WIDE]
    want = np.concatenate((a * b, a - b, a * x[1], a + a * b, a * y[2]))
    np.testing.assert_array_equal(out[: 3 * WIDE], want[: 3 * WIDE])
    np.testing.assert_allclose(out[:-1], want, rtol=1e-5, atol=1e-6)
    assert out[-1] == 7


@inline
def _total(x: Any) -> Any:
    return sum_of(load16(x, 0))


def test_a_sum_adds_halves_to_each_other() -> None:
    x = normal(NARROW) * np.float32(7.0) ** (np.arange(NARROW, dtype=np.float32) % 4)
    want = x
    while len(want) > 1:
        want = want[: len(want) // 2] + want[len(want) // 2 :]
    assert _total(x) == want[0]
    in_order = np.float32(0.0)
    for value in x:
        in_order += value
    assert want[0] != in_order


@inline
def _move(x: Any, rows: Any, back: Any, part: Any) -> None:
    split_columns(x, 2, rows, 1, NARROW + 3)
    join_columns(rows, 1, NARROW + 3, back, 0)
    copy(x, 5, part, 1, 2)


def test_columns_become_rows_and_columns_again() -> None:
    count = COLUMNS * NARROW
    x, back, part = normal(count + 2), np.empty(count, np.float32), np.zeros(4, np.float32)
    rows = np.zeros((COLUMNS, NARROW + 3), np.float32)
    _move(x, rows, back, part)
    np.testing.assert_array_equal(rows[:, 1 : 1 + NARROW], x[2:].reshape(NARROW, COLUMNS).T)
    np.testing.assert_array_equal(back, x[2:])
    np.testing.assert_array_equal(part, [0, x[5], x[6], 0])


@inline
def _products(left: Any, right: Any, out: Any) -> None:
    """Rows 1 and 2 of left times all of right, onto rows 0 and 2 of out from column 3 on."""
    add_products(left, 5, 5, 2, right, 1, 40, 5, out, 3, 2 * 40, WIDE)
    add_products(left, 0, 0, 1, right, 1, 40, 5, out, 40, 0, NARROW)


def test_products_of_several_rows_are_added_at_flat_places() -> None:
    left, right = normal(15).reshape(3, 5), normal(5 * 40).reshape(5, 40)
    out = np.ones((3, 40), np.float32)
    _products(left, right, out)
    want = np.ones((3, 40), np.float32)
    want[[0, 2], 3 : 3 + WIDE] += left[1:] @ right[:, 1 : 1 + WIDE]
    want[1, :NARROW] += left[0] @ right[:, 1 : 1 + NARROW]
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)


@inline
def _extremes(x: Any, out: Any) -> Any:
    store(out, 0, larger(load16(x, 0), load16(x, NARROW)))
    store(out, NARROW, plus(load16(x, 0), load16(x, NARROW)))
    return largest(load16(x, 0))


def test_larger_and_largest() -> None:
    x, out = normal(2 * NARROW), np.empty(2 * NARROW, np.float32)
    assert _extremes(x, out) == x[:NARROW].max()
    np.testing.assert_array_equal(out[:NARROW], np.maximum(x[:NARROW], x[NARROW:]))
    np.testing.assert_array_equal(out[NARROW:], x[:NARROW] + x[NARROW:])
    for lane in (NARROW - 1, 0, 4):
        x[lane] = np.nan
        assert _extremes(x, out) == np.nanmax(x[:NARROW])
    assert out[4] == x[NARROW + 4]
