"""Compiling for a card that is not here finds what Triton's interpreter lets pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.ahead import shared_limit
from benchmarks.gpu.ahead_engine import ZeroFilled, narrowed
from benchmarks.gpu.geometries import LARGE, SMALL, geometry
from engine.reserve.parameters import tensors_of_config
from engine.weights.model_config import parse_config
from kernels.environment import TRITON_DEFAULTS
from tests.processes import run_python

ROOT = Path(__file__).resolve().parents[3]

KERNELS = """
import torch
import triton
import triton.language as tl

@triton.jit
def good(p_x, N: tl.constexpr):
    o_x = tl.arange(0, N)
    tl.store(p_x + o_x, tl.load(p_x + o_x) * 2)

@triton.jit
def odd_size(p_x, N: tl.constexpr):
    o_x = tl.arange(0, N)
    tl.store(p_x + o_x, tl.load(p_x + o_x) * 2)
"""

TRY = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, "."]
import mine, torch
from benchmarks.gpu.ahead import without_a_card
with without_a_card(90) as variants:
    x = torch.zeros(64)
    for dtype in (torch.float32, torch.float32, torch.bfloat16):
        mine.good[(1,)](x.to(dtype), N=64)
    try:
        mine.odd_size[(1,)](x, N=48)
    except Exception as error:
        print(type(error).__name__, "power of 2" in str(error.__cause__ or error))
print([variant.kernel for variant in variants], float(x.sum()))
"""


def test_variants_are_compiled_once_and_faults_are_raised(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(KERNELS, encoding="utf-8")
    env = {"TRITON_CACHE_DIR": str(tmp_path / "cache"), **TRITON_DEFAULTS}
    out = run_python(TRY, tmp_path, **env).splitlines()
    assert out == ["CompilationError True", "['good', 'good'] 0.0"]


RUN = f"""
import runpy, sys
sys.argv = ["x", "--compile-for", "90", "--smoke", "--stages", "draft_chain-smoke,moves-smoke"]
runpy.run_path({str(ROOT / "scripts" / "gpu_check")!r}, run_name="__main__")
"""


def test_an_operator_is_compiled_for_an_h200(tmp_path: Path) -> None:
    env = {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "OUT": str(tmp_path)}
    run_python(RUN, tmp_path, **env)
    report = json.loads((tmp_path / "gpu_check.json").read_text(encoding="utf-8"))
    rows = {row["name"]: row for row in report["found"] if row["name"] != "time"}
    assert rows["draft_chain smoke"]["status"] == "skip"
    found = rows["moves smoke"]["numbers"]
    assert (found["cases"], found["failed"]) == (2, 0)
    assert found["variants"] > 0
    assert 0 < found["shared"] < shared_limit(90) == 227 * 1024


def test_a_card_without_an_entry_gets_the_smallest_limit() -> None:
    assert shared_limit(121) == shared_limit(89) == 99 * 1024


@pytest.mark.parametrize("name", [SMALL, LARGE])
def test_a_narrowed_model_keeps_what_kernels_are_compiled_for(name: str) -> None:
    small, full = parse_config(narrowed(geometry(name))), parse_config(geometry(name))
    kept = (
        "head_dim",
        "num_attention_heads",
        "num_key_value_heads",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "rotary_dim",
        "mtp_layers",
    )
    assert [getattr(small, key) for key in kept] == [getattr(full, key) for key in kept]
    assert (small.gdn_layers, small.attention_layers) == (3, 1)
    assert sum(t.elements for t in tensors_of_config(small)) < 2e8


def test_empty_memory_is_zero() -> None:
    like = torch.ones(3, dtype=torch.int64)
    with ZeroFilled():
        made = [torch.empty(3, dtype=torch.int64), torch.empty_like(like), like.new_empty(2)]
    assert not any(tensor.any() for tensor in made)
    assert [tensor.dtype for tensor in made] == [torch.int64] * 3
