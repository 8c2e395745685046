"""What a product is said to take is what it takes."""

from __future__ import annotations

import pytest
import torch

from kernels.linear import form


@pytest.mark.parametrize("rows", [1, 16, 17, 300])
def test_scratch_is_what_the_shape_says(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form, "TILES", True)
    pieces = torch.empty(form.pieces_shape(rows, 96), dtype=torch.int16)
    assert form.scratch_bytes(rows, 96) == pieces.nbytes
    assert pieces.nbytes == -(-rows // 16) * 16 * 96 * 4
    monkeypatch.setattr(form, "TILES", False)
    assert form.scratch_bytes(rows, 96) == 0
