"""Routing, grouped products over stacked experts and the sum, with no word to the host.

A row's outputs are added in rising order of their experts, whatever rows share the batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.moe.naive import MoeParams, StackedExperts
from kernels.moe.triton_experts import add_up, run_experts
from kernels.moe.triton_route import MOST_EXPERTS, make_tiles, route
from kernels.triton_guard import guard


def pack_experts(gate_up: Tensor, down: Tensor, dtype: torch.dtype) -> StackedExperts:
    """Hold gate_up [E, 2 I, H] and down [E, H, I] in the activation dtype.

    Raises:
        UnsupportedKernelError: no kernel for this dtype, number of experts or device.
    """
    held = StackedExperts(gate_up.to(dtype).contiguous(), down.to(dtype).contiguous())
    guard("moe_mlp", held.gate_up, len(held), MOST_EXPERTS, "experts E")
    return held


def moe_mlp(x: Tensor, params: MoeParams, silu_mul: Callable[[Tensor], Tensor]) -> Tensor:
    """As naive.moe_mlp: x [R, H] -> [R, H], with experts from pack_experts.

    Raises:
        UnsupportedKernelError: no kernel for this dtype, number of experts or device.
    """
    experts = params.experts
    assert isinstance(experts, StackedExperts), "the grouped product takes stacked experts"
    guard("moe_mlp", x, len(experts), MOST_EXPERTS, "experts E")
    assert x.dtype == experts.gate_up.dtype
    assert x.stride(1) == 1
    assert params.top_k <= len(experts)
    shared = params.shared.down(silu_mul(params.shared.gate_up(x)))
    if not x.shape[0]:
        return shared
    weights, ids = route(params.router(x), params.top_k, params.renormalise)
    parts = run_experts(x, weights, make_tiles(ids, len(experts)), experts)
    return add_up(shared, params.shared_gate(x), parts, params.top_k)
