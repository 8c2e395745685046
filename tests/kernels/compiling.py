"""Compiles the Triton kernels of an operator's cases for a card that is not there; runs none.

The interpreter takes Python that the compiler refuses (global names, types that change in a loop).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kernels import triton_guard
from kernels.cases import Case, CaseSize

HOPPER = GPUTarget("cuda", 90, 32)


class NoCard:
    """What Triton asks of a driver before a launch."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def one_of_each_kind(cases: list[Case]) -> Iterator[Case]:
    """The first case of every first word of a name and dtype; float16 compiles as bfloat16 does."""
    seen = set()
    for case in cases:
        kind = (case.name.split()[0], case.dtype)
        if kind not in seen and case.dtype is not torch.float16:
            seen.add(kind)
            yield case


def compile_all(operator: str) -> int:
    """Compile what the operator's cases launch; returns how many kernels that were."""
    compiled = set()
    launch = JITFunction.run

    def only_compile(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        compiled.add(kernel.hash)
        return kernel

    JITFunction.run = only_compile
    driver.set_active(NoCard())
    triton_guard.runs_on = lambda device: True
    cases = importlib.import_module(f"kernels.{operator}.cases").cases
    for case in one_of_each_kind(cases(CaseSize.SMOKE, torch.device("cpu"))):
        case.run()
    return len(compiled)


if __name__ == "__main__":
    print(compile_all(sys.argv[1]))
