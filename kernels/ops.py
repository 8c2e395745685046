"""The choice of an implementation for every operator, by device. Nothing falls back silently."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.attention.types import AttentionParams, KvPages
from kernels.batch import RaggedBatch
from kernels.draft_chain.types import Chain, ChainWeights
from kernels.environment import set_triton_defaults
from kernels.gdn.types import GdnParams, GdnState
from kernels.moe.naive import Experts, MoeParams
from kernels.moves.naive import MoveRows

Linear = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Ops:
    """One implementation of every operator.

    Attributes:
        name: which one, for the log and `spark doctor`.
        pack_linear: weight [N, K] -> callable [M, K] -> [M, N] with `nbytes` and `form`.
        pack_experts: gate_up [E, 2 I, H], down [E, H, I] -> what moe_mlp takes as experts.
        add_rms_norm, join_norms, silu_mul, gdn_mixer, attention_mixer, moe_mlp, top1, move_rows:
            see naive.py.
        draft_chain: packs a head for its naive.py; None where rows better run a pass at a time.
        limit_threads: how many threads the numba kernels may use from now on.
        one_form: a row leaves the same bits whether it is a prompt's, runs with many or alone.
    """

    name: str
    pack_linear: Callable[[Tensor], Linear]
    pack_experts: Callable[[Tensor, Tensor], Experts]
    add_rms_norm: Callable[[Tensor, Tensor | None, Tensor, float], Tensor]
    join_norms: Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
    silu_mul: Callable[[Tensor], Tensor]
    gdn_mixer: Callable[[Tensor, GdnParams, GdnState, RaggedBatch], Tensor]
    attention_mixer: Callable[
        [Tensor, AttentionParams, KvPages, RaggedBatch, Tensor | None], Tensor
    ]
    moe_mlp: Callable[[Tensor, MoeParams, Callable[[Tensor], Tensor]], Tensor]
    top1: Callable[[Tensor], tuple[Tensor, Tensor]]
    move_rows: MoveRows
    draft_chain: Callable[[ChainWeights], Chain] | None
    limit_threads: Callable[[int], None]
    one_form: bool = False


def naive_ops(dtype: torch.dtype) -> Ops:
    """Plain torch on any device; the truth that the others are tested against."""
    from kernels.attention.naive import attention_mixer
    from kernels.gdn.naive import gdn_mixer
    from kernels.linear.naive import pack
    from kernels.moe.naive import moe_mlp, pack_each
    from kernels.moves.naive import move_rows
    from kernels.rms_norm.naive import add_rms_norm, join_norms
    from kernels.silu_mul.naive import silu_mul
    from kernels.top1.naive import top1

    pack_linear = partial(pack, dtype=dtype)
    return Ops(
        name="naive",
        pack_linear=pack_linear,
        pack_experts=partial(pack_each, pack_linear=pack_linear),
        add_rms_norm=add_rms_norm,
        join_norms=join_norms,
        silu_mul=silu_mul,
        gdn_mixer=gdn_mixer,
        attention_mixer=attention_mixer,
        moe_mlp=moe_mlp,
        top1=top1,
        move_rows=move_rows,
        draft_chain=None,
        limit_threads=lambda threads: None,
    )


def cpu_ops() -> Ops:
    """Packed linears and numba kernels, float32 activations."""
    import numba

    from kernels.attention.cpu import attention_mixer
    from kernels.draft_chain.cpu import draft_chain
    from kernels.gdn.cpu import gdn_mixer
    from kernels.linear.cpu import fp16_rows_vary, pack
    from kernels.moe.cpu import moe_mlp
    from kernels.moe.naive import pack_each
    from kernels.moves.cpu import move_rows
    from kernels.rms_norm.cpu import add_rms_norm, join_norms
    from kernels.silu_mul.cpu import silu_mul
    from kernels.top1.cpu import top1

    pad = fp16_rows_vary()
    most = numba.config.NUMBA_NUM_THREADS

    pack_linear = partial(pack, pad=pad)
    return Ops(
        name="cpu",
        pack_linear=pack_linear,
        pack_experts=partial(pack_each, pack_linear=pack_linear),
        add_rms_norm=add_rms_norm,
        join_norms=join_norms,
        silu_mul=silu_mul,
        gdn_mixer=gdn_mixer,
        attention_mixer=attention_mixer,
        moe_mlp=moe_mlp,
        top1=top1,
        move_rows=move_rows,
        draft_chain=draft_chain,
        limit_threads=lambda threads: numba.set_num_threads(min(threads, most)),
        one_form=True,
    )


def triton_ops(dtype: torch.dtype, *, batch_invariant: bool) -> Ops:
    """Our kernels on a CUDA device, or on any under Triton's interpreter.

    Products go through torch (cuBLAS), which picks another order of summation for other numbers of
    rows; with `batch_invariant` through tiles that are always the same.
    """
    set_triton_defaults()
    from kernels.attention.triton import attention_mixer
    from kernels.gdn.triton import gdn_mixer
    from kernels.linear.naive import pack
    from kernels.linear.triton import pack as pack_tiled
    from kernels.moe.triton import moe_mlp, pack_experts
    from kernels.moves.triton import move_rows
    from kernels.rms_norm.triton import add_rms_norm, join_norms
    from kernels.silu_mul.triton import silu_mul
    from kernels.top1.triton import top1

    return Ops(
        name="triton",
        pack_linear=partial(pack_tiled if batch_invariant else pack, dtype=dtype),
        pack_experts=partial(pack_experts, dtype=dtype),
        add_rms_norm=add_rms_norm,
        join_norms=join_norms,
        silu_mul=silu_mul,
        gdn_mixer=gdn_mixer,
        attention_mixer=attention_mixer,
        moe_mlp=moe_mlp,
        top1=top1,
        move_rows=move_rows,
        draft_chain=None,
        limit_threads=lambda threads: None,
    )


def chosen(ops: Ops) -> dict[str, str]:
    """Operator -> implementation: the module of kernels/<operator>/ that runs, `torch` for plain
    products, `passes` where a chain of drafts is run one pass at a time.
    """
    found: dict[str, str] = {}
    for field in fields(Ops):
        operator: Any = getattr(ops, field.name)
        if field.name in ("name", "limit_threads", "one_form", "pack_experts"):
            continue
        if operator is None:
            found[field.name] = "passes"
            continue
        module = getattr(operator, "func", operator).__module__
        found[field.name.removeprefix("pack_")] = module.rpartition(".")[2]
    if found["linear"] == "naive":
        found["linear"] = "torch"
    return found
