"""Our model over a checkpoint folder, driven segment by segment."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from engine.config import GRID, EngineConfig
from engine.model.hybrid import HybridModel
from engine.model.load import load_network
from engine.pools.allocate import allocate_pools
from engine.reserve.ssm_reserve import SpeculationPolicy, SsmRollbackMode
from engine.runner import RowPhase, Segment
from engine.weights.model_config import load_config
from kernels.ops import Ops, cpu_ops, naive_ops

SLOTS = 6
BLOCKS_EACH = 8


def operators(kernels: str) -> Ops:
    return cpu_ops() if kernels == "cpu" else naive_ops(torch.float32)


def build(
    folder: Path,
    kernels: str,
    *,
    drafts: int = 3,
    threads: int = 1,
    mode: SsmRollbackMode = SsmRollbackMode.CARRY,
    snapshots: int = 0,
) -> HybridModel:
    """Model with SLOTS slots, all of which may verify `drafts` drafts, and its drafter."""
    config = load_config(folder)
    policy = SpeculationPolicy(drafts, mode)
    limits = EngineConfig(
        str(folder), max_batch_size=SLOTS, max_seq_len=512, snapshot_slots=snapshots
    )
    pools = allocate_pools(config, limits, policy, SLOTS * BLOCKS_EACH, torch.float32)
    ops = operators(kernels)
    network = load_network(folder, config, pools, ops, 512, with_mtp=True)
    return HybridModel(config, network, pools, ops, torch.float32, threads, mode)


def segment(
    slot: int,
    start: int,
    ids: list[int],
    phase: RowPhase,
    *,
    committed: int | None = None,
    logit_rows: int | None = None,
) -> Segment:
    """Rows of the sequence in `slot`, whose blocks follow from the slot; all logits by default."""
    return Segment(
        slot=slot,
        start=start,
        token_ids=tuple(ids),
        phase=phase,
        committed=len(ids) if committed is None else committed,
        block_table=tuple(range(slot * BLOCKS_EACH, (slot + 1) * BLOCKS_EACH)),
        logit_rows=len(ids) if logit_rows is None else logit_rows,
    )


def split_prompt(slot: int, ids: list[int], sizes: list[int]) -> list[Segment]:
    """The prompt in chunks; those that leave the 64 grid are replayed, as the scheduler does."""
    parts, start = [], 0
    for size in sizes:
        phase = RowPhase.PREFILL if start % GRID == 0 else RowPhase.REPLAY
        parts.append(segment(slot, start, ids[start : start + size], phase))
        start += size
    assert start == len(ids)
    return parts


def run(model: HybridModel, segments: list[Segment]) -> Tensor:
    """Logits of the segments, one forward each, concatenated."""
    return torch.cat([model.forward([part]).logits for part in segments])
