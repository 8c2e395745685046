"""Routing and the loop over experts; the products go through whatever linear form was packed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.linear.naive import PlainLinear

Linear = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Expert:
    """One gated MLP: gate_up [H -> 2 I], gate first, and down [I -> H]."""

    gate_up: Linear
    down: Linear


class Experts(Protocol):
    """E experts by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Expert: ...


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """gate_up [E, 2 I, H], gate first, and down [E, H, I], for kernels that take all at once."""

    gate_up: Tensor
    down: Tensor

    def __len__(self) -> int:
        """E."""
        return self.gate_up.shape[0]

    def __getitem__(self, index: int, /) -> Expert:
        """One of them, as views."""
        return Expert(PlainLinear(self.gate_up[index]), PlainLinear(self.down[index]))


def pack_each(
    gate_up: Tensor, down: Tensor, pack_linear: Callable[[Tensor], Linear]
) -> list[Expert]:
    """gate_up [E, 2 I, H], down [E, H, I] -> E experts, each packed alone."""
    return [
        Expert(pack_linear(wide), pack_linear(narrow))
        for wide, narrow in zip(gate_up, down, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class MoeParams:
    """Router [H -> E], the experts, the shared expert and its gate [H -> 1].

    `renormalise` divides the top-k weights by their sum.
    """

    router: Linear
    experts: Experts
    shared: Expert
    shared_gate: Linear
    top_k: int
    renormalise: bool


def route(logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """logits [R, E] -> (weights [R, k] float32, ids [R, k]): softmax over all, then top-k.

    The weights of float64 logits are float64.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    weights, chosen = torch.softmax(wide, dim=-1).topk(top_k, dim=-1)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, chosen


def moe_mlp(x: Tensor, params: MoeParams, silu_mul: Callable[[Tensor], Tensor]) -> Tensor:
    """x [R, H] -> [R, H]: sum over the chosen experts, plus sigmoid(gate) * shared expert."""
    shared = params.shared.down(silu_mul(params.shared.gate_up(x)))
    out = shared * torch.sigmoid(params.shared_gate(x))
    add_experts(out, x, params, silu_mul)
    return out


def add_experts(
    out: Tensor, x: Tensor, params: MoeParams, silu_mul: Callable[[Tensor], Tensor]
) -> None:
    """Add the weighted outputs of each row's experts to out [R, H] in place."""
    weights, chosen = route(params.router(x), params.top_k, params.renormalise)
    # Experts in rising order: a row's sum has one order whatever rows share the batch.
    for expert_id in chosen.unique().tolist():
        rows, rank = (chosen == expert_id).nonzero(as_tuple=True)
        expert = params.experts[expert_id]
        part = expert.down(silu_mul(expert.gate_up(x[rows])))
        out.index_add_(0, rows, part * weights[rows, rank, None].to(part.dtype))
