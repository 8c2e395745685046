"""Every Triton kernel compiles to machine code of a card, without one at hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import kernels
from tests.processes import run_python

ROOT = Path(__file__).resolve().parents[2]
OPERATORS = sorted(
    path.parent.name
    for path in Path(kernels.__path__[0]).glob("*/triton.py")
    if (path.parent / "cases.py").is_file()
)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Per operator how many kernels, or what the compiler said."""
    code = (
        f"import json, sys; sys.path.insert(0, {str(ROOT)!r})\n"
        f"from tests.kernels.compiling import compile_all\n"
        f"print(json.dumps(compile_all({OPERATORS!r})))"
    )
    # A cache of its own: what an earlier run compiled would hide that nothing compiles now.
    folder = tmp_path_factory.mktemp("triton")
    env = {"TRITON_CACHE_DIR": str(folder), "TRITON_DEFAULT_FP_FUSION": "1"}
    found: dict[str, str] = json.loads(run_python(code, folder, seconds=300, **env).split("\n")[-2])
    return found


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_kernels_of_an_operator_compile(operator: str, compiled: dict[str, str]) -> None:
    assert compiled[operator].isdigit(), compiled[operator]
    assert int(compiled[operator]) > 0
