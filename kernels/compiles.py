"""Counts the kernel variants that came into being after a start, which should have made them all.

A variant that is read from a cache on disk counts too: it stalls a step all the same. Knows no
kernel by name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any


class CompileCounter:
    """Counts from its making on, for as long as the process lives; a reading costs 2 us."""

    def __init__(self) -> None:
        # Tables alone: to go by their dispatchers costs 20 us in the middle of a step instead of 6.
        self._overloads = [dispatcher.overloads for dispatcher in _dispatchers()]
        self._numba_before = self._numba()
        self._triton = 0
        if "triton" in sys.modules:
            self._listen()

    def count(self) -> int:
        """Variants so far."""
        return self._triton + self._numba() - self._numba_before

    def _numba(self) -> int:
        return sum(map(len, self._overloads))

    def _listen(self) -> None:
        """Triton says when a variant is ready; whoever listened before is still told."""
        from triton import knobs

        before = knobs.runtime.jit_post_compile_hook

        def hook(**fields: Any) -> bool | None:
            self._triton += 1
            return None if before is None else before(**fields)

        knobs.runtime.jit_post_compile_hook = hook


def _dispatchers() -> Iterator[Any]:
    """Everything in our loaded modules that numba compiles by argument types."""
    seen: set[int] = set()
    for name, module in list(sys.modules.items()):
        if not name.startswith("kernels."):
            continue
        for value in vars(module).values():
            if hasattr(value, "overloads") and hasattr(value, "py_func") and id(value) not in seen:
                seen.add(id(value))
                yield value
