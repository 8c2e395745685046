"""float16 by arithmetic: every number that there is, and rounding as torch rounds."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch

from kernels.gdn.half import half_bits, nearest_half


@numba.njit
def rounded(x: Any, out: Any) -> None:
    for i in range(x.shape[0]):
        out[i] = nearest_half(x[i])


@numba.njit
def bits_of(x: Any, out: Any) -> None:
    for i in range(x.shape[0]):
        out[i] = half_bits(x[i])


def test_every_half_comes_back_with_its_bits() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    halves = bits.view(np.float16)
    finite = np.isfinite(halves)
    x = halves[finite].astype(np.float32)
    out, again = np.empty_like(x), np.empty(x.size, np.uint16)
    rounded(x, out)
    bits_of(x, again)
    assert np.array_equal(out.view(np.int32)[x != 0], x.view(np.int32)[x != 0])
    assert np.array_equal(again, bits[finite])


def test_rounding_is_that_of_torch() -> None:
    generator = np.random.default_rng(3)
    exponents = generator.integers(127 - 30, 127 + 17, 400_000)
    patterns = (exponents << 23) | generator.integers(0, 1 << 23, exponents.size)
    x = patterns.astype(np.uint32).view(np.float32) * generator.choice([-1, 1], exponents.size)
    x = np.ascontiguousarray(x, np.float32)
    # Exactly between two halves, where ties go to even.
    halves = np.arange(1, 0x7BFF, dtype=np.uint16).view(np.float16).astype(np.float32)
    x = np.concatenate((x, (halves[1:] + halves[:-1]) / 2, np.float32([65519.9, 1e9, -1e30, 0])))
    out = np.empty_like(x)
    rounded(x, out)
    expected = torch.from_numpy(x).clamp(-65504, 65504).half().float().numpy()
    assert np.array_equal(out, expected)


def test_what_is_not_finite_is_no_number() -> None:
    x = np.float32([np.nan, np.inf, -np.inf])
    out, bits = np.empty_like(x), np.empty(3, np.uint16)
    rounded(x, out)
    assert np.isnan(out[0])
    assert np.isnan(out[1:]).all()
    bits_of(x[:1], bits[:1])
    assert np.isnan(bits[:1].view(np.float16)[0])
