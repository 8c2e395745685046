"""Cases of the mixture of experts: few of them with odd widths, and on a card 35B-A3B's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from kernels.cases import Case, CaseSize
from kernels.linear.naive import PlainLinear
from kernels.moe.naive import Expert, MoeParams, StackedExperts
from kernels.moe.naive import moe_mlp as naive_moe_mlp
from kernels.silu_mul.naive import silu_mul as naive_silu_mul

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@dataclass(frozen=True, slots=True)
class _Shape:
    """E experts of which k are chosen, widths of the residual, an expert and the shared one."""

    experts: int
    top_k: int
    width: int
    inner: int
    shared: int


SMOKE = [
    (torch.float32, 3, _Shape(5, 2, 40, 24, 33)),
    (torch.float32, 19, _Shape(4, 3, 33, 17, 16)),
    (torch.bfloat16, 19, _Shape(4, 3, 33, 17, 16)),
    (torch.bfloat16, 1, _Shape(8, 8, 16, 16, 8)),
    (torch.float16, 3, _Shape(5, 2, 40, 24, 33)),
]
CARD = [(rows, _Shape(256, 8, 2048, 512, 512)) for rows in (1, 8, 32, 128, 2048)]


def cases(size: CaseSize, device: torch.device) -> list[Case]:
    """Cases of one shape share their weights, which are made when one is first run."""
    if size is CaseSize.SMOKE:
        return [
            _case(rows, shape, dtype, device, _weights(shape, dtype, device))
            for dtype, rows, shape in SMOKE
        ]
    weights = _weights(CARD[0][1], torch.bfloat16, device)
    return [_case(rows, shape, torch.bfloat16, device, weights) for rows, shape in CARD]


Weights = Callable[[], dict[str, Tensor]]


def _weights(shape: _Shape, dtype: torch.dtype, device: torch.device) -> Weights:
    s = shape
    sizes = {
        "router": (s.experts, s.width),
        "gate_up": (s.experts, 2 * s.inner, s.width),
        "down": (s.experts, s.width, s.inner),
        "shared_gate_up": (2 * s.shared, s.width),
        "shared_down": (s.width, s.shared),
        "shared_gate": (1, s.width),
    }

    @cache
    def weights() -> dict[str, Tensor]:
        generator = torch.Generator(device).manual_seed(1)
        return {
            name: torch.empty(size, dtype=dtype, device=device).normal_(
                std=size[-1] ** -0.5, generator=generator
            )
            for name, size in sizes.items()
        }

    return weights


def _params(weights: dict[str, Tensor], shape: _Shape) -> MoeParams:
    """In the dtype of the weights."""
    return MoeParams(
        router=PlainLinear(weights["router"]),
        experts=StackedExperts(weights["gate_up"], weights["down"]),
        shared=Expert(PlainLinear(weights["shared_gate_up"]), PlainLinear(weights["shared_down"])),
        shared_gate=PlainLinear(weights["shared_gate"]),
        top_k=shape.top_k,
        renormalise=True,
    )


class _Widened:
    """Weights in float64; the experts one by one, since all of a large model would not fit."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self._stacked = StackedExperts(weights["gate_up"], weights["down"])
        large = ("gate_up", "down")
        self.small = {k: w if k in large else w.double() for k, w in weights.items()}

    def __len__(self) -> int:
        return len(self._stacked)

    def __getitem__(self, index: int, /) -> Expert:
        gate_up, down = self._stacked.gate_up[index], self._stacked.down[index]
        return Expert(PlainLinear(gate_up.double()), PlainLinear(down.double()))


def _case(
    rows: int, shape: _Shape, dtype: torch.dtype, device: torch.device, weights: Weights
) -> Case:
    from kernels.moe.triton import moe_mlp
    from kernels.silu_mul.triton import silu_mul

    s = shape

    @cache
    def x() -> Tensor:
        generator = torch.Generator(device).manual_seed(2)
        return torch.randn(rows, s.width, generator=generator, device=device).to(dtype)

    def logits(rows_of_x: Tensor) -> Tensor:
        # Of float32: equal bfloat16 logits would leave the choice open.
        return rows_of_x.float() @ weights()["router"].float().T

    def run() -> list[Tensor]:
        params = replace(_params(weights(), s), router=logits)
        return [moe_mlp(x(), params, silu_mul)]

    def truth() -> list[Tensor]:
        wide = _Widened(weights())
        params = replace(_params(wide.small, s), router=lambda r: logits(r).double(), experts=wide)
        return [naive_moe_mlp(x().double(), params, naive_silu_mul)]

    # Experts that at least one of `rows` rows chooses, when all are as likely.
    busy = s.experts * (1 - (1 - s.top_k / s.experts) ** rows)
    numbers = s.experts * s.width + busy * 3 * s.inner * s.width + 3 * s.shared * s.width
    return Case(
        name=f"rows {rows} experts {s.experts} top {s.top_k} width {s.width} inner {s.inner}",
        dtype=dtype,
        run=run,
        truth=truth,
        step=lambda: moe_mlp(x(), _params(weights(), s), silu_mul),
        tolerance=TOLERANCE[dtype],
        bytes=int(numbers + 2 * rows * s.width) * dtype.itemsize,
        flops=2 * rows * s.width * (s.experts + 3 * (s.top_k * s.inner + s.shared) + 1),
    )
