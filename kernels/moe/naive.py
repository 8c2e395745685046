"""Routing and the loop over experts; the products go through whatever linear form was packed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Linear = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Expert:
    """One gated MLP: gate_up [H -> 2 I], gate first, and down [I -> H]."""

    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class MoeParams:
    """Router [H -> E], the experts, the shared expert and its gate [H -> 1].

    `renormalise` divides the top-k weights by their sum.
    """

    router: Linear
    experts: Sequence[Expert]
    shared: Expert
    shared_gate: Linear
    top_k: int
    renormalise: bool


def route(logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """logits [R, E] -> (weights [R, k] float32, ids [R, k]): softmax over all, then top-k."""
    weights, chosen = torch.softmax(logits.float(), dim=-1).topk(top_k, dim=-1)
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
