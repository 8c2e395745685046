"""Compiles kernels for a card that is not here: what the interpreter cannot see, a compiler does.

Wrappers run on tensors without numbers; every launch ends after the compiler, at the machine code.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.resources import files
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

import kernels
from benchmarks.gpu.options import Options
from benchmarks.gpu.rows import Number, Row, Status, error_row, verdict
from benchmarks.gpu.runner import Emit
from benchmarks.gpu.stage_kernels import load_cases
from kernels.cases import Case, CaseSize

# Largest shared memory of a block in KiB by compute capability (CUDA C++ Programming Guide,
# technical specifications); of one without an entry, the smallest.
_SHARED_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227}
_SHARED_KIB_ELSEWHERE = 99


@dataclass(frozen=True, slots=True)
class Variant:
    """One compiled form of a kernel: its name, shared memory in bytes, and how long it took."""

    kernel: str
    shared: int
    seconds: float


def shared_limit(capability: int) -> int:
    """Bytes of shared memory that a block may have on cards of a compute capability, e.g. 90."""
    return 1024 * _SHARED_KIB.get(capability, _SHARED_KIB_ELSEWHERE)


def run(operator: str, size: CaseSize, options: Options, emit: Emit) -> None:
    """Emit a row per case that does not compile, and one for the operator."""
    assert options.capability is not None
    name = f"{operator} {size.value}"
    if not (files("kernels") / operator / "triton.py").is_file():
        emit(Row(operator, name, Status.SKIP, f"kernels/{operator} has no triton.py"))
        return
    failed, cases = 0, load_cases(operator, size, torch.device("cpu"))
    if not cases:
        emit(Row(operator, name, Status.FAIL, f"kernels/{operator} has no cases.py, or no case"))
        return
    with without_a_card(options.capability) as variants:
        for case in cases:
            try:
                _launch(case)
            except Exception as error:
                failed += 1
                emit(error_row(operator, f"{case.name} {case.dtype}", error))
    largest = max(variants, key=lambda one: one.shared, default=Variant("none", 0, 0.0))
    limit = shared_limit(options.capability)
    text = (
        f"{len(variants)} variants of {len(cases)} cases for sm_{options.capability}, "
        f"shared memory at most {largest.shared:,} of {limit:,} bytes ({largest.kernel})"
    )
    numbers: dict[str, Number] = {
        "cases": len(cases),
        "failed": failed,
        "variants": len(variants),
        "shared": largest.shared,
        "largest": largest.kernel,
        "seconds": sum(one.seconds for one in variants),
    }
    good = not failed and bool(variants) and largest.shared <= limit
    emit(Row(operator, name, verdict(good), text, numbers))


@torch.inference_mode()
def _launch(case: Case) -> None:
    """Run a case without numbers, or with them where index tensors are computed from others."""
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            case.run()
    except (DataDependentOutputException, DynamicOutputShapeException):
        case.run()


@contextmanager
def without_a_card(capability: int) -> Iterator[list[Variant]]:
    """Inside, launches compile for that compute capability and do nothing; gives what they made."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction, MockTensor

    found: list[Variant] = []
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        def described(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return MockTensor(value.dtype, value.shape)
            return value

        before, start = _variants(self), time.perf_counter()
        kernel = launch(
            self,
            *(described(value) for value in args),
            grid=grid,
            warmup=True,
            **{key: described(value) for key, value in kwargs.items()},
        )
        if _variants(self) > before:
            seconds = time.perf_counter() - start
            found.append(Variant(self.fn.__name__, int(kernel.metadata.shared), seconds))
        return kernel

    driver.set_active(_NoCard(capability))
    try:
        with ExitStack() as stack:
            stack.enter_context(patch.object(JITFunction, "run", compile_only))
            for module in _guarded():
                stack.enter_context(patch.object(module, "runs_on", lambda device: True))
            yield found
    finally:
        driver.set_active(None)


def _guarded() -> list[ModuleType]:
    """Every module of Triton kernels that asks whether they run on a device."""
    from kernels.triton_guard import runs_on

    for found in pkgutil.walk_packages(kernels.__path__, "kernels."):
        if found.name.rpartition(".")[2].startswith("triton"):
            importlib.import_module(found.name)
    loaded = [module for name, module in sys.modules.items() if name.startswith("kernels.")]
    return [module for module in loaded if getattr(module, "runs_on", None) is runs_on]


class _NoCard:
    """As much of a Triton driver as a compilation asks for."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        """The number of a card."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The number of a stream."""
        return 0

    def get_current_target(self) -> Any:
        """What to compile for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)


def _variants(function: Any) -> int:
    return sum(len(caches[0]) for caches in function.device_caches.values())
