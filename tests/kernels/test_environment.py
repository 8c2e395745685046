"""Whoever compiles our kernels compiles them as the check of a card does."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu import cli
from tests.processes import run_python

ROOT = Path(__file__).resolve().parents[2]

# As the engine process does it: everything but Triton is imported, then operators are chosen.
CODE = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
if "keep" not in sys.argv:
    os.environ.pop("TRITON_DEFAULT_FP_FUSION", None)
import torch, engine.build, kernels.ops, spark_server.engine_process
assert "triton" not in sys.modules
kernels.ops.triton_ops(torch.bfloat16, batch_invariant=True)
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
print(CUDABackend(GPUTarget("cuda", 90, 32)).parse_options({{}}).enable_fp_fusion)
"""


def test_a_server_fuses_products_and_sums_without_a_warning(tmp_path: Path) -> None:
    """Triton 3.9 warns where nobody says so, which would be an error here; 3.10 would not do it."""
    assert run_python(CODE, tmp_path).strip() == "True"


def test_the_operators_word_stands(tmp_path: Path) -> None:
    code = "import sys\nsys.argv.append('keep')\n" + CODE
    assert run_python(code, tmp_path, TRITON_DEFAULT_FP_FUSION="0").strip() == "False"


def test_the_check_of_a_card_does_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[bool] = []
    monkeypatch.setattr(cli, "set_triton_defaults", lambda: called.append(True))
    assert cli.main(["--compile-for", "90", "--stages", "none such"]) == 2
    assert called == [True]
