"""Sizes in bytes as people write them. Does not know which setting they belong to."""

from __future__ import annotations

import re
from fractions import Fraction

from engine.errors import ConfigError

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"(-?)(\d+(?:\.\d+)?)\s*([A-Za-z]*|%)", re.ASCII)
_EXAMPLES = "write 1.5GiB, 800MB or plain bytes"


def parse_size(text: str | int) -> int:
    """Bytes of a size such as `1.5GiB` (powers of 1024), `800MB` (powers of 1000) or `1048576`.

    Raises:
        ConfigError: no size, a negative one, an unknown unit, or a share such as `80%`.
    """
    match = _SIZE.fullmatch(str(text).strip())
    if match is None:
        raise ConfigError(f"{text!r} is no size; {_EXAMPLES}")
    sign, number, unit = match.groups()
    if unit == "%":
        share = float(Fraction(number) / 100)
        raise ConfigError(
            f"{text!r} is a share, not a size; use --gpu-memory-utilization {share:g}"
        )
    if sign:
        raise ConfigError(f"the size {text!r} is negative; {_EXAMPLES}")
    factor = _UNITS.get(unit.lower())
    if factor == 1 and "." in number:
        raise ConfigError(f"the size {text!r} is a fraction of a byte; {_EXAMPLES}")
    if factor is None:
        raise ConfigError(f"{text!r} has the unknown unit {unit!r}; {_EXAMPLES}")
    return int(Fraction(number) * factor)


def format_bytes(count: int) -> str:
    """`17.40 GiB`, `151.5 MiB`, `4.0 KiB` or `12 B`, for people."""
    for unit, factor, digits in (("GiB", 2**30, 2), ("MiB", 2**20, 1), ("KiB", 2**10, 1)):
        if abs(count) >= factor:
            return f"{count / factor:.{digits}f} {unit}"
    return f"{count} B"
