"""Compiles the Triton kernels of an operator's cases for a card that is not there; runs none.

The interpreter takes Python that the compiler refuses (global names, types that change in a loop).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
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


def one_of_each_kind(cases: list[Case]) -> list[Case]:
    """One case of every first word of a name, of bfloat16 where there is one.

    Other dtypes launch the same code; a kernel of many tiles takes ten seconds to compile.
    """
    found: dict[str, Case] = {}
    for case in cases:
        kind = case.name.split()[0]
        if kind not in found or found[kind].dtype is not torch.bfloat16:
            found[kind] = case
    return list(found.values())


def stop_behind_the_compiler(keep: Callable[[Any], None]) -> None:
    """From now on, in this process, a launch compiles and hands the kernel to `keep`."""
    launch = JITFunction.run

    def only_compile(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        keep(kernel)
        return kernel

    JITFunction.run = only_compile
    driver.set_active(NoCard())
    triton_guard.runs_on = lambda device: True


def compile_all(operators: Sequence[str]) -> dict[str, str]:
    """Compile what the operators' cases launch; returns for each how many kernels, or the error."""
    compiled = set()
    stop_behind_the_compiler(lambda kernel: compiled.add(kernel.hash))
    found = {}
    for operator in operators:
        compiled.clear()
        cases = importlib.import_module(f"kernels.{operator}.cases").cases
        try:
            for case in one_of_each_kind(cases(CaseSize.SMOKE, torch.device("cpu"))):
                case.run()
        except Exception as error:
            found[operator] = f"{case.name}: {error!r}"
        else:
            found[operator] = str(len(compiled))
    return found
