"""Cases of move_rows: whole slots of recurrent state, with and without their ring."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kernels.cases import Case, CaseSize
from kernels.moves.naive import move_rows as naive_move_rows

# Layers, slots, numbers in a row of each tensor, moves.
SMOKE = [(2, 5, (7, 48), 1), (3, 6, (2049, 33, 5, 1), 2)]
# h, conv, ring inputs and ring gates of 0.8B and 27B: heads x 128 x 128, conv_dim x 4, three rows.
SMALL = (16 * 128 * 128, 6144 * 4, 3 * 6144, 3 * 2 * 16)
LARGE = (48 * 128 * 128, 10240 * 4, 3 * 10240, 3 * 2 * 48)
CARD = [(18, 33, SMALL, 1), (18, 33, SMALL, 16), (48, 33, LARGE, 1), (48, 33, LARGE, 16)]


def cases(size: CaseSize, device: torch.device) -> list[Case]:
    """float32, as states are."""
    shapes = CARD if size is CaseSize.CARD else SMOKE
    return [_case(*shape, device) for shape in shapes]


def _case(
    layers: int, slots: int, widths: tuple[int, ...], moves: int, device: torch.device
) -> Case:
    from kernels.moves.triton import move_rows

    @cache
    def tensors() -> list[Tensor]:
        generator = torch.Generator(device).manual_seed(1)
        return [
            torch.randn(layers, slots, width, generator=generator, device=device)
            for width in widths
        ]

    src = torch.arange(slots - moves, slots, device=device)
    dst = torch.arange(moves, device=device)

    def run() -> list[Tensor]:
        mine = [t.clone() for t in tensors()]
        move_rows(mine, mine, src, dst)
        return mine

    def truth() -> list[Tensor]:
        right = [t.double() for t in tensors()]
        naive_move_rows(right, right, src, dst)
        return right

    return Case(
        name=f"layers {layers} numbers {sum(widths)} moves {moves}",
        dtype=torch.float32,
        run=run,
        truth=truth,
        step=lambda: move_rows(tensors(), tensors(), src, dst),
        tolerance=1e-7,
        bytes=2 * layers * sum(widths) * moves * 4,
        flops=0,
    )
