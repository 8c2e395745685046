"""When Triton tests run, and that an ordinary run passes them over."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.conftest import why_no_triton
from tests.processes import run_python

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("environ", "cuda", "runs"),
    [
        ({}, False, False),
        ({"TRITON_INTERPRET": "0"}, False, False),
        ({"TRITON_INTERPRET": "1"}, False, True),
        ({}, True, True),
    ],
)
def test_triton_tests_need_the_interpreter_or_a_card(
    environ: dict[str, str], cuda: bool, runs: bool
) -> None:
    reason = why_no_triton(environ, cuda)
    assert (not reason) == runs
    assert runs or "TRITON_INTERPRET=1" in reason


PROBE = """
import os, sys, torch
os.environ.pop("TRITON_INTERPRET", None)
torch.cuda.is_available = lambda: False
os.chdir(sys.argv[1])
import pytest
sys.exit(pytest.main([sys.argv[2], "-q", "-p", "no:cacheprovider"]))
"""


def test_an_ordinary_run_skips_them_with_the_reason(tmp_path: Path) -> None:
    """Through pytest itself, so that the hook is known to be in force."""
    probe = "tests/kernels/test_silu_mul_triton.py"
    code = f"import sys; sys.argv = ['x', {str(ROOT)!r}, {probe!r}]\n{PROBE}"
    output = run_python(code, tmp_path)
    assert "passed" not in output
    assert "Triton kernels need TRITON_INTERPRET=1" in output
