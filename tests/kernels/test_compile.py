"""Every Triton kernel compiles to machine code of a card, without one at hand."""

from __future__ import annotations

from pathlib import Path

import pytest

import kernels
from tests.processes import run_python

ROOT = Path(__file__).resolve().parents[2]
OPERATORS = sorted(path.parent.name for path in Path(kernels.__path__[0]).glob("*/triton.py"))


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_kernels_of_an_operator_compile(operator: str, tmp_path: Path) -> None:
    if not (ROOT / "kernels" / operator / "cases.py").is_file():
        pytest.skip(f"kernels/{operator} has no cases yet")
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        f"from tests.kernels.compiling import compile_all\nprint(compile_all({operator!r}))"
    )
    # A cache of its own: what an earlier run compiled would hide that nothing compiles now.
    env = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    assert int(run_python(code, tmp_path, **env).split()[-1]) > 0
