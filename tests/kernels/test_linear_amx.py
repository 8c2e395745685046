"""Products in matrix registers: exact pieces, the same bits for every batch, and none elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numba
import pytest
import torch
from numba.core.codegen import get_host_cpu_features
from torch import Tensor

from kernels.linear import amx, cpu
from kernels.tile_registers import usable
from tests.processes import run_python

needs_tiles = pytest.mark.skipif(not usable(), reason="this machine multiplies no tiles")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@needs_tiles
@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [(16, 32), (48, 64), (256, 512), (1040, 96), (776, 64), (24, 32), (8, 64), (7, 32), (33, 32)],
)
def test_against_float64_and_row_by_row(outputs: int, inputs: int) -> None:
    weight = (random(outputs, inputs) / inputs**0.5).bfloat16()
    packed = cpu.pack(weight, pad=False)
    assert packed.form == "amx"
    assert packed.nbytes == 2 * weight.numel()
    x = random(300, inputs, seed=1)
    whole = packed(x)
    torch.testing.assert_close(whole.double(), x.double() @ weight.double().T, atol=2e-5, rtol=1e-5)
    # A block of 16 rows, a pair of them and a chunk of eight each end at some of these.
    for count in (*range(36), 47, 48, 49, 63, 64, 65, 127, 128, 129, 256, 287):
        assert torch.equal(packed(x[:count]), whole[:count])
        assert torch.equal(packed(x[11 : 11 + count]), whole[11 : 11 + count])


@needs_tiles
def test_threads_share_the_work_and_change_no_bit() -> None:
    packed, x = amx.pack(random(80, 64).bfloat16()), random(200, 64, seed=1)
    found = []
    before = numba.get_num_threads()
    try:
        for threads in range(1, before + 1):
            numba.set_num_threads(threads)
            found.append(packed(x))
    finally:
        numba.set_num_threads(before)
    assert all(torch.equal(out, found[0]) for out in found)


@needs_tiles
def test_pieces_are_the_nearest() -> None:
    """A unit matrix gives the rows back to half of the last of sixteen bits, to neither side."""
    packed = amx.pack(torch.eye(64).bfloat16())
    x = random(40, 64) * torch.logspace(-25, 25, 64)
    x[3] = torch.arange(64) * 257 - 8000
    x[4] = (1 + torch.arange(64) * 2.0**-23) * 3.0e38
    found = packed(x)
    off = (found.double() - x.double()) / x.double()
    assert off.abs().max() <= 2.0**-16
    assert off.mean().abs() < 2.0**-20
    assert torch.equal(packed(x.bfloat16().float()), x.bfloat16().float())
    x[5, 7] = torch.nan
    spoiled = packed(x)
    assert spoiled[5].isnan().all()
    assert torch.equal(spoiled[6:], found[6:])


@needs_tiles
def test_rows_of_a_wider_tensor() -> None:
    packed, wide = amx.pack(random(32, 64).bfloat16()), random(20, 200, seed=1)
    part = wide[:, 8:72]
    assert torch.equal(packed(part), packed(part.contiguous()))


def test_what_does_not_fit() -> None:
    fitting = torch.zeros(32, 64, dtype=torch.bfloat16)
    assert amx.fits(fitting)
    assert amx.fits(fitting[:24])
    assert not amx.fits(fitting[:0])
    assert not amx.fits(fitting[:, :48])
    assert not amx.fits(fitting.half())


@needs_tiles
def test_the_form_of_other_cpus(tmp_path: Path) -> None:
    """They hold the same weight in fp16, and give nearly the same numbers."""
    features: Any = get_host_cpu_features()
    others = ",".join(f for f in features.split(",") if "amx" not in f)
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})
import torch
from kernels.linear import cpu
from tests.kernels.test_linear_amx import random
packed = cpu.pack((random(64, 96) / 9).bfloat16(), cpu.fp16_rows_vary())
print(packed.form, float(packed(random(5, 96, seed=1)).sum()))
"""
    form, total = run_python(code, tmp_path, seconds=60, NUMBA_CPU_FEATURES=others).split()
    here = cpu.pack((random(64, 96) / 9).bfloat16(), pad=False)
    assert (form, here.form) == ("fp16", "amx")
    assert float(total) == pytest.approx(float(here(random(5, 96, seed=1)).sum()), abs=1e-3)
