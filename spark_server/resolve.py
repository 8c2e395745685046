"""What `auto` stands for: settings become the engine's configuration, with a reason for each.

The first half runs in the API process without torch, the second in the engine process.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from engine.config import GRID, EngineConfig
from engine.errors import ConfigError
from engine.reserve.preflight import CPU_UTILISATION, GPU_UTILISATION
from engine.weights.model_config import load_config

if TYPE_CHECKING:  # the engine process comes here too and has no use for pydantic
    from spark_server.settings import Settings

DEFAULT_SEQ_LEN = 4096
_GIB = 2**30
_CGROUP_LIMITS = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)


def engine_config(settings: Settings, folder: str) -> tuple[EngineConfig, list[str]]:
    """Everything that can be known without torch; device, dtype and budget may stay open.

    Returns:
        The configuration and one sentence per `auto` that was resolved.

    Raises:
        ModelFormatError: the folder holds no model that can be served.
        ConfigError: `--max-seq-len` exceeds what the model allows.
    """
    notes: list[str] = []
    model = load_config(Path(folder))
    allowed = model.max_position_embeddings
    length = settings.batching.max_seq_len
    if length is None:
        length = min(allowed, DEFAULT_SEQ_LEN)
        notes.append(f"max-seq-len auto is {length}, the model allows {allowed}")
    elif length > allowed:
        raise ConfigError(
            f"--max-seq-len {length} exceeds the {allowed} positions of the model; "
            f"use {allowed} or less"
        )
    threads = settings.model.threads
    if threads is None:
        threads = len(os.sched_getaffinity(0))
        notes.append(f"threads auto is {threads}, the CPUs that this process may use")
    prefill = settings.batching.max_prefill_tokens
    config = EngineConfig(
        model_dir=folder,
        device=settings.model.device,
        dtype=settings.model.dtype,
        max_batch_size=settings.batching.max_batch_size,
        max_seq_len=length,
        max_prefill_tokens=prefill - prefill % GRID,
        max_waiting=settings.batching.max_waiting,
        memory_budget=settings.memory.memory_budget,
        kv_tokens=settings.memory.kv_tokens,
        threads=threads,
        kernels=settings.model.kernels,
        batch_invariant=settings.model.batch_invariant,
        enforce_eager=settings.model.enforce_eager,
        slot_compaction=not settings.speculation.pinned_slots,
        speculation=settings.speculation.policy(recurrent=model.gdn_layers > 0),
    )
    return config, notes


def finish_config(
    config: EngineConfig, utilization: float | None
) -> tuple[EngineConfig, list[str]]:
    """Resolve device, dtype and memory budget on the machine at hand; imports torch if it must.

    Raises:
        ConfigError: `--device cuda` without a usable GPU.
    """
    notes: list[str] = []
    device = config.device
    if device != "cpu":
        device = _pick_device(device)
        if config.device == "auto":
            notes.append(f"device auto is {device}")
    dtype = config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
        notes.append(f"dtype auto is {dtype}")
    budget = config.memory_budget
    if budget is None:
        free, total = gpu_memory() if device == "cuda" else (None, cpu_memory())
        share = utilization or (GPU_UTILISATION if device == "cuda" else CPU_UTILISATION)
        budget = int(total * share)
        why = f"{share:g} of the {device}'s {total / _GIB:.2f} GiB"
        if free is not None and free < budget:
            # Somebody else is on the card: their memory is no share of ours.
            budget, why = free, f"all that is free; {why} would be {budget / _GIB:.2f} GiB"
        notes.append(f"memory-budget auto is {budget / _GIB:.2f} GiB, {why}")
    return replace(config, device=device, dtype=dtype, memory_budget=budget), notes


def _pick_device(asked: str) -> str:
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if asked == "cuda":
        raise ConfigError(
            "--device cuda: torch finds no GPU here; install a CUDA build of torch "
            "or use --device cpu"
        )
    return "cpu"


def gpu_memory() -> tuple[int, int]:
    """Bytes that are free on the current CUDA device, and that it has."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return int(free), int(total)


def cpu_memory() -> int:
    """Bytes that this process could have: the machine's memory or its control group's limit."""
    total = int(psutil.virtual_memory().total)
    for path in _CGROUP_LIMITS:
        try:
            limit = Path(path).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if limit.isdigit():
            total = min(total, int(limit))
    return total
