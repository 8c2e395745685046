"""Every operator's Triton kernels compile to machine code of a card, without one at hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import kernels
from kernels.environment import TRITON_DEFAULTS
from tests.processes import run_python

ROOT = Path(__file__).resolve().parents[2]
OPERATORS = sorted(path.parent.name for path in Path(kernels.__path__[0]).glob("*/triton.py"))

COMPILE = f"""
import importlib, json, sys
sys.path.insert(0, {str(ROOT)!r})
import torch
from benchmarks.gpu.ahead import without_a_card
from kernels.cases import CaseSize

def of_each_kind(cases):
    # Other dtypes launch the same code, and a kernel of many tiles takes ten seconds to compile.
    kinds = {{}}
    for case in cases:
        kind = case.name.split()[0]
        if kind not in kinds or kinds[kind].dtype is not torch.bfloat16:
            kinds[kind] = case
    return kinds.values()

found = {{}}
for operator in {OPERATORS!r}:
    try:
        cases = importlib.import_module(f"kernels.{{operator}}.cases").cases
        with without_a_card(90) as variants:
            for case in of_each_kind(cases(CaseSize.SMOKE, torch.device("cpu"))):
                case.run()
        found[operator] = sorted({{variant.kernel for variant in variants}})
    except Exception as error:
        found[operator] = repr(error)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str] | str]:
    """Per operator its kernels' names, or what the compiler said."""
    # A cache of its own: what an earlier run compiled would hide that nothing compiles now.
    folder = tmp_path_factory.mktemp("triton")
    env = {"TRITON_CACHE_DIR": str(folder), **TRITON_DEFAULTS}
    printed = run_python(COMPILE, folder, seconds=300, **env)
    found: dict[str, list[str] | str] = json.loads(printed.splitlines()[-1])
    return found


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_kernels_of_an_operator_compile(
    operator: str, compiled: dict[str, list[str] | str]
) -> None:
    assert compiled[operator]
    assert isinstance(compiled[operator], list), compiled[operator]


def test_no_kernel_of_the_experts_is_left_out(compiled: dict[str, list[str] | str]) -> None:
    kernels_of_moe = {"_route", "_count", "_place", "_gate_up", "_down", "_add_up"}
    assert kernels_of_moe <= set(compiled["moe"])
