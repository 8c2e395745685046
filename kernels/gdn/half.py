"""float16 in numba on a CPU, which has no such type: by arithmetic on float32 and on bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.jit import inline

_LARGEST = np.float32(65504.0)
_EXPONENT = np.int32(0x7F800000)
_MAGNITUDE = np.int32(0x7FFFFFFF)
# Exponent of float16's smallest normal number, 2^-14, in place.
_SMALLEST = np.int32((127 - 14) << 23)
_GREATEST = np.int32((127 + 15) << 23)
_SHIFT = np.int32(13 << 23)
_HALF_STEP = np.int32(0x400000)
_ABOVE_HALF = np.int32(0x47FFFFFF)
_SUBNORMALS = np.float32(2.0**24)


@inline
def nearest_half(x: Any) -> Any:
    """A float32 as the nearest number that float16 holds, ties to even, at most its largest; a NaN
    for what is not finite.

    Adding 1.5 * 2^(e + 13) leaves ten bits behind a number of exponent e, or multiples of 2^-24
    where it is smaller than 2^-14; taking it away again is exact.
    """
    exponent = min(max(np.int32(np.float32(x).view(np.int32) & _EXPONENT), _SMALLEST), _GREATEST)
    magic = np.int32(np.int32(exponent + _SHIFT) | _HALF_STEP).view(np.float32)
    kept = max(min(x, _LARGEST), -_LARGEST)
    # x - x is 0, but for what is not finite, and that must not become a number.
    return (kept + magic) - magic + (x - x)


@inline
def half_bits(x: Any) -> Any:
    """The float16 bits of a float32 that float16 holds; of one that is no number, of a NaN."""
    bits = np.float32(x).view(np.int32)
    sign = (bits >> np.int32(16)) & np.int32(0x8000)
    magnitude = bits & _MAGNITUDE
    if magnitude > _ABOVE_HALF:
        value = np.int32(0x7E00)
    elif magnitude < _SMALLEST:
        value = np.int32(abs(x) * _SUBNORMALS)
    else:
        value = np.int32((magnitude >> np.int32(13)) - np.int32(112 << 10))
    return np.uint16(sign | value)
