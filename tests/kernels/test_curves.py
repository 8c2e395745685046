"""exp, sigmoid and silu of lanes against numpy in double precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels.curves import exp_less, sigmoid_of, silu_of
from kernels.jit import exp32, inline
from kernels.lanes import NARROW, WIDE, load16, load32, store

Floats = NDArray[np.float32]


@inline
def _curves(x: Any, less: Any, out: Any) -> None:
    """out [3, count] of x, in registers of both widths."""
    count = x.shape[0]
    for i in range(0, count, WIDE):
        store(out, i, exp_less(load32(x, i), less))
        store(out, count + i, sigmoid_of(load32(x, i)))
    for i in range(0, count, NARROW):
        store(out, 2 * count + i, silu_of(load16(x, i)))


@inline
def _one_by_one(x: Any, out: Any) -> None:
    for i in range(x.shape[0]):
        out[i] = exp32(x[i])


def curves(x: Floats, less: float = 0.0) -> Floats:
    out = np.empty((3, len(x)), np.float32)
    _curves(x, np.float32(less), out)
    return out


@pytest.mark.parametrize("less", [0.0, 3.25])
def test_curves_are_those_of_numpy(less: float) -> None:
    x = np.linspace(-80, 80, 32 * 999, dtype=np.float32)
    exp, sigmoid, silu = curves(x, less)
    wide = x.astype(np.float64)
    right = 1 / (1 + np.exp(-wide))
    np.testing.assert_allclose(exp, np.exp((x - np.float32(less)).astype(np.float64)), rtol=3e-7)
    np.testing.assert_allclose(sigmoid, right, rtol=5e-7)
    np.testing.assert_allclose(silu, wide * right, rtol=5e-7)


def test_exp_is_exp32_to_the_last_bits() -> None:
    x = np.linspace(-90, 90, 32 * 99, dtype=np.float32)
    alone = np.empty_like(x)
    _one_by_one(x, alone)
    np.testing.assert_allclose(curves(x)[0], alone, rtol=1.2e-7)


def test_far_out_they_stay_numbers_and_no_number_stays_none() -> None:
    x = np.zeros(WIDE, np.float32)
    x[:6] = [np.inf, -np.inf, 1e30, -1e30, np.nan, -100]
    exp, sigmoid, silu = curves(x)
    assert np.isfinite(np.delete(exp[:6], 4)).all()
    np.testing.assert_allclose(sigmoid[:4], [1, 0, 1, 0], atol=1e-37)
    np.testing.assert_allclose(silu[[2, 3, 5]], [1e30, 0, 0], atol=1e-7)
    assert np.isnan([exp[4], sigmoid[4], silu[4]]).all()
    assert (exp[6:] == 1).all()
    assert (sigmoid[6:] == 0.5).all()
    assert (silu[6:] == 0).all()
