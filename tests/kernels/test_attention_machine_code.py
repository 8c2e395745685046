"""What the compiler makes of the decode kernel at the head size of real models, without a card."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kernels.environment import TRITON_DEFAULTS
from tests.processes import run_python

ROOT = Path(__file__).resolve().parents[2]
# Shared memory of one SM of compute capability 9.0 that programs may use.
SM_BYTES = 227 * 1024

CODE = f"""
import json, sys
sys.path.insert(0, {str(ROOT)!r})
import torch
from benchmarks.gpu.ahead import without_a_card
from kernels.attention.cases import cases
from kernels.cases import CaseSize
with without_a_card(90):
    for case in cases(CaseSize.CARD, torch.device("cpu")):
        if case.name == "decode 1 x 1024 keys, 27B":
            case.step()
from kernels.attention.triton_decode import _attend_splits
[kernel] = _attend_splits.device_caches[0][0].values()
print(json.dumps([kernel.metadata.shared, kernel.asm["ptx"]]))
"""


@pytest.fixture(scope="module")
def decode(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str]:
    """Bytes of shared memory of one program, and its PTX."""
    folder = tmp_path_factory.mktemp("triton")
    env = {"TRITON_CACHE_DIR": str(folder), **TRITON_DEFAULTS}
    found: Any = json.loads(run_python(CODE, folder, seconds=120, **env).splitlines()[-1])
    return int(found[0]), str(found[1])


def test_pages_are_copied_16_bytes_at_a_time(decode: tuple[int, str]) -> None:
    """A mask along the tokens, or a place that looks unaligned, turns K into 2-byte loads."""
    copies = re.findall(r"cp\.async\.\w+\.shared\.global .*, 0x(\w+), ", decode[1])
    assert copies
    assert set(copies) == {"10"}
    assert not re.search(r"ld\.global\S*\.b16", decode[1])


def test_a_tile_is_on_its_way_while_another_is_worked_on(decode: tuple[int, str]) -> None:
    """A wait for all copies in the loop means one buffer: a load in it depends on another load."""
    waits = [int(n) for n in re.findall(r"cp\.async\.wait_group\s+(\d+)", decode[1])]
    assert max(waits) >= 2


def test_two_programs_fit_on_an_sm(decode: tuple[int, str]) -> None:
    assert 2 * (decode[0] + 1024) <= SM_BYTES


SMALL = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import torch
from benchmarks.gpu.ahead import without_a_card
from kernels.attention.cases import cases
from kernels.cases import CaseSize
with without_a_card(121):
    for case in cases(CaseSize.CARD, torch.device("cpu")):
        if case.name == "prefill 512 on 4096, 27B":
            case.step()
from kernels.attention.triton_prefill import _attend_chunks
[kernel] = _attend_chunks.device_caches[0][0].values()
print(kernel.metadata.shared)
"""


def test_a_prompt_fits_a_card_with_less_shared_memory(tmp_path: Path) -> None:
    """Compute capability 12.1 (DGX Spark) allows 101,376 bytes a block; 128 lines need 139,776."""
    env = {"TRITON_CACHE_DIR": str(tmp_path), **TRITON_DEFAULTS}
    assert int(run_python(SMALL, tmp_path, seconds=120, **env).splitlines()[-1]) <= 101_376
