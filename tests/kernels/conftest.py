"""Triton tests need the interpreter or a card; without either they are skipped, and say why.

Triton reads TRITON_INTERPRET when a kernel module is imported, so it is never set here: `make test`
runs these files in a pytest call of their own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import pytest
import torch

from kernels.environment import set_triton_defaults

# On a card Triton 3.9 warns without it, and warnings are errors.
set_triton_defaults()


def why_no_triton(environ: Mapping[str, str], cuda: bool) -> str:
    """The reason to skip Triton tests, empty when they can run."""
    if environ.get("TRITON_INTERPRET") == "1" or cuda:
        return ""
    return "Triton kernels need TRITON_INTERPRET=1, as `make test` sets it, or a CUDA device"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_no_triton(os.environ, torch.cuda.is_available())
    if not reason:
        return
    for item in items:
        if "triton" in item.path.name and "kernels" in item.path.parts:
            item.add_marker(pytest.mark.skip(reason=reason))
