"""Counts kernel variants that Triton makes ready while something runs. Knows no kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass
class Compiles:
    """How many so far; one that Triton finds in its folder on disk counts too, as it stalls a step
    all the same.
    """

    count: int = 0


@contextmanager
def counted() -> Iterator[Compiles]:
    """Count inside the block; a hook that was there before is still called."""
    from triton import knobs

    found, before = Compiles(), knobs.runtime.jit_post_compile_hook

    def hook(**fields: Any) -> bool | None:
        found.count += 1
        return None if before is None else before(**fields)

    knobs.runtime.jit_post_compile_hook = hook
    try:
        yield found
    finally:
        knobs.runtime.jit_post_compile_hook = before
