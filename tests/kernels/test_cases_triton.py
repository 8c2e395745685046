"""Every operator has cases, and each of the small ones is within its tolerance."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import kernels
from kernels.cases import CaseSize, relative_error
from tests.kernels.poison import DEVICE

FOLDERS = sorted(path.parent.name for path in Path(kernels.__path__[0]).glob("*/__init__.py"))


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_small_case_is_within_its_tolerance(folder: str) -> None:
    cases = importlib.import_module(f"kernels.{folder}.cases").cases(CaseSize.SMOKE, DEVICE)
    assert cases, f"kernels/{folder}/cases.py offers no case"
    errors = {
        f"{c.name} {c.dtype}": relative_error(c.run(), c.truth()) / c.tolerance for c in cases
    }
    assert len(errors) == len(cases), "two cases have one name"
    assert max(errors.values()) <= 1, {name: e for name, e in errors.items() if e > 1}
    for case in cases:
        case.step()


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_shapes_of_a_card_are_described_without_being_made(folder: str) -> None:
    """Making them here would take gigabytes: `cases` itself must allocate nothing large."""
    cases = importlib.import_module(f"kernels.{folder}.cases").cases(CaseSize.CARD, DEVICE)
    assert cases
    # Drafts may be in bytes: the target verifies them.
    most = 5e-2 if folder == "draft_chain" else 1e-2
    assert all(case.bytes > 0 and case.flops >= 0 and 0 < case.tolerance <= most for case in cases)
    assert len({(case.name, case.dtype) for case in cases}) == len(cases)
