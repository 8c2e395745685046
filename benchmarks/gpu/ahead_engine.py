"""Compiles all that an engine launches for a card that is not here, and looks for what comes late.

The model has the heads of a geometry, few layers and a small vocabulary; its numbers mean nothing,
since no kernel runs. What Triton makes a variant of does not depend on numbers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from benchmarks.gpu.ahead import shared_limit, without_a_card
from benchmarks.gpu.engines import built, engine_config, forced_core, speculation, timed_steps
from benchmarks.gpu.geometries import geometry
from benchmarks.gpu.options import Options
from benchmarks.gpu.rows import Row, verdict
from benchmarks.gpu.runner import Emit
from engine.reserve.ssm_reserve import SsmRollbackMode
from kernels.compiles import CompileCounter

WIDTHS = (1, 2, 3, 16)
DRAFTS = 3
LENGTH = 256


def run(name: str, mode: SsmRollbackMode | None, options: Options, emit: Emit) -> None:
    """Emit a row: variants of an engine in a rollback mode, or of one without drafts.

    In a process of its own, or what another engine had compiled would never be late.
    """
    emit(_compiled(name, mode, options))


def narrowed(config: dict[str, Any]) -> dict[str, Any]:
    """The same heads with one layer of full attention and little else; norms have their cases."""
    text = dict(config.get("text_config", config))
    text |= {"num_hidden_layers": 4, "vocab_size": 4096, "intermediate_size": 512}
    text["hidden_size"] = min(text["hidden_size"], 1024)
    return text


class ZeroFilled(TorchFunctionMode):
    """Memory that a kernel would have written holds zeros, which are valid token ids."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Any call of torch; empty tensors are made as zeros."""
        instead = {
            torch.empty: torch.zeros,
            torch.empty_like: torch.zeros_like,
            torch.Tensor.new_empty: torch.Tensor.new_zeros,
        }
        return instead.get(func, func)(*args, **(kwargs or {}))


def _compiled(name: str, mode: SsmRollbackMode | None, options: Options) -> Row:
    assert options.capability is not None
    on_triton = replace(options, kernels="triton")
    config = engine_config(on_triton, max(WIDTHS), LENGTH, "bfloat16")
    if mode is not None:
        config = replace(config, speculation=speculation(mode, max(WIDTHS), DRAFTS))
    with (
        without_a_card(options.capability) as variants,
        ZeroFilled(),
        built(narrowed(geometry(name)), config) as engine,
    ):
        late = CompileCounter()
        core = engine.core if mode is None else forced_core(engine, config, options.acceptance)
        for width in WIDTHS:
            timed_steps(core, width, 2)
        count = late.count()
    limit, largest = shared_limit(options.capability), max(variants, key=lambda one: one.shared)
    text = (
        f"{len(variants)} variants, {count} after warm-up (goal 0), "
        f"shared memory at most {largest.shared:,} of {limit:,} bytes ({largest.kernel})"
    )
    numbers = {"variants": len(variants), "late": count, "shared": largest.shared}
    good = not count and largest.shared <= limit
    return Row(name, f"engine {spelled(mode)}", verdict(good), text, numbers)


def spelled(mode: SsmRollbackMode | None) -> str:
    """The mode's name; `plain` for no drafts."""
    return "plain" if mode is None else mode.value
