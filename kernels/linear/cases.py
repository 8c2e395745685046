"""Cases of the fixed-tile product: odd sizes, and on a card the matrices of 0.8B and 27B.

On a card torch's own product stands beside it: what --batch-invariant costs is their difference.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from kernels.cases import Case, CaseSize

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
# Outputs, inputs.
SMOKE = [(1, 1), (33, 65), (66, 100)]
SMOKE_ROWS = (1, 3, 65)
# Of 0.8B: GDN input and output, gate and up, down; of 27B the same, and its head.
CARD = [
    (8224, 1024),
    (1024, 2048),
    (7168, 1024),
    (1024, 3584),
    (16480, 5120),
    (5120, 6144),
    (34816, 5120),
    (5120, 17408),
    (248320, 5120),
]
CARD_ROWS = (1, 32, 128)


def cases(size: CaseSize, device: torch.device) -> list[Case]:
    """The rows of one matrix share its tensor, which is made when a case is first run."""
    card = size is CaseSize.CARD
    found = []
    for dtype in [torch.bfloat16] if card else list(TOLERANCE):
        for outputs, inputs in CARD if card else SMOKE:
            weight = _weight(outputs, inputs, dtype, device)
            for rows in CARD_ROWS if card else SMOKE_ROWS:
                found.append(_case("triton", rows, outputs, inputs, weight, dtype, device))
                if card:
                    found.append(_case("plain", rows, outputs, inputs, weight, dtype, device))
    return found


def _weight(
    outputs: int, inputs: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], Tensor]:
    @cache
    def weight() -> Tensor:
        generator = torch.Generator(device).manual_seed(1)
        made = torch.empty(outputs, inputs, dtype=dtype, device=device)
        return made.normal_(std=inputs**-0.5, generator=generator)

    return weight


def _case(
    form: str,
    rows: int,
    outputs: int,
    inputs: int,
    weight: Callable[[], Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> Case:
    from kernels.linear.triton import linear

    product = linear if form == "triton" else torch.nn.functional.linear

    @cache
    def x() -> Tensor:
        generator = torch.Generator(device).manual_seed(2)
        return torch.randn(rows, inputs, generator=generator, device=device).to(dtype)

    return Case(
        name=f"{form} rows {rows} outputs {outputs} inputs {inputs}",
        dtype=dtype,
        run=lambda: [product(x(), weight())],
        truth=lambda: [_product64(x(), weight())],
        step=lambda: product(x(), weight()),
        tolerance=TOLERANCE[dtype],
        bytes=(outputs * inputs + rows * (inputs + outputs)) * dtype.itemsize,
        flops=2 * rows * outputs * inputs,
    )


def _product64(x: Tensor, weight: Tensor, piece: int = 16384) -> Tensor:
    """x @ weight^T in float64, without the whole weight in float64 at once."""
    wide = x.double()
    return torch.cat([wide @ part.double().T for part in weight.split(piece)], dim=1)
