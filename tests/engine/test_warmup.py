"""After the start no kernel is compiled any more, whatever the requests are."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.core import EngineCore
from engine.reserve.ssm_reserve import SsmRollbackMode
from engine.speculation.policy import ControllerMode, PolicySettings
from kernels.compiles import CompileCounter
from tests.e2e.work import core, requests, run
from tests.processes import run_python

ROOT = Path(__file__).resolve().parents[2]
CARRY = PolicySettings(3, SsmRollbackMode.CARRY, controller=ControllerMode.OFF)
# In a process of its own, where no other test has made a variant.
REQUESTS = """
from engine.reserve.ssm_reserve import SsmRollbackMode
from engine.speculation.policy import ControllerMode, PolicySettings
from tests.e2e.work import core, requests, run
modes = [PolicySettings(3, mode, controller=ControllerMode.OFF) for mode in SsmRollbackMode]
for speculation in (*modes, PolicySettings(1), None):
    engine = core(max_batch_size=5, speculation=speculation)
    run(engine, requests(16), width=12)
    stats = engine.stats()
    print(stats.jit_compiles, stats.steps)
"""


def test_no_request_waits_for_a_compilation(tmp_path: Path) -> None:
    lines = run_python(REQUESTS, tmp_path, PYTHONPATH=str(ROOT)).splitlines()
    assert [line.split()[0] for line in lines] == ["0"] * 5
    assert all(int(line.split()[1]) > 20 for line in lines)


@pytest.fixture
def kernel() -> Iterator[Any]:
    """A numba kernel in a module of `kernels`, and the module."""
    import numba

    module = types.ModuleType("kernels.of_this_test")
    module.double = numba.njit(lambda x: x + x)  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    yield module.double
    del sys.modules[module.__name__]


def test_a_variant_that_comes_late_is_counted(kernel: Any) -> None:
    kernel(1)
    counter = CompileCounter()
    kernel(2)
    assert counter.count() == 0
    kernel(2.0)
    assert counter.count() == 1


def test_variants_of_triton_are_counted_and_others_still_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    runtime = SimpleNamespace(jit_post_compile_hook=lambda **fields: told.append(fields["key"]))
    fake = types.ModuleType("triton")
    fake.knobs = SimpleNamespace(runtime=runtime)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", fake)
    counter = CompileCounter()
    runtime.jit_post_compile_hook(key="one", repr="_kernel[...]")
    assert counter.count() == 1
    assert told == ["one"]


def test_the_engine_reports_what_the_counter_says() -> None:
    engine: EngineCore = core(max_batch_size=1)
    engine._compiles = lambda: 3
    assert engine.stats().jit_compiles == 3


def test_a_warm_start_leaves_the_slots_as_new() -> None:
    engine = core(max_batch_size=2, speculation=CARRY)
    first = run(engine, requests(3), width=2)
    again = run(engine, requests(3), width=2)
    assert first == again
