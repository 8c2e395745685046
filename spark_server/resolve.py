"""What `auto` stands for: settings become the engine's configuration, with a reason for each.

The first half runs in the API process without torch, the second in the engine process.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config import GRID, EngineConfig
from engine.errors import ConfigError
from engine.reserve.memory import DeviceMemory, gpu_memory, host_memory, memory_budget
from engine.reserve.sizes import format_bytes
from engine.reserve.start import preflight_of, served_tensors
from engine.reserve.terms import CUDA_CONTEXT
from engine.weights.model_config import load_config

if TYPE_CHECKING:  # the engine process comes here too and has no use for pydantic
    from spark_server.settings import Settings

DEFAULT_SEQ_LEN = 4096
# One of these is there wherever CUDA can work on Linux: a card, WSL, or an integrated GPU.
_GPU_NODES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/nvhost-gpu", "/dev/nvmap")


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
    cache = settings.prefix_cache
    snapshots = cache.slots
    if snapshots.skipped is not None:
        notes.append(f"ssm-cache-slots is {snapshots.slots}, {snapshots.skipped}")
    elif cache.enable_prefix_caching and not cache.active:
        notes.append("prefix caching is off, --ssm-cache-slots 0 keeps no state to begin behind")
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
        prefix_caching=cache.active,
        snapshot_slots=snapshots.slots,
        prefix_cache_exact=cache.prefix_cache_exact,
        h_f16_pool=settings.memory.ssm_h_dtype == "f16-pool",
        watchdogs=settings.watchdogs.enabled,
        decode_ring_slots=settings.watchdogs.ssm_decode_ring_slots,
        decode_ring_override=settings.watchdogs.ssm_decode_ring,
    )
    return config, notes


def finish_config(
    config: EngineConfig, utilization: float | None = None, host_reserve: int | None = None
) -> tuple[EngineConfig, list[str]]:
    """Resolve device, dtype and memory budget on the machine at hand; imports torch if it must.

    Args:
        utilization: share of the device's memory, None for the device's default.
        host_reserve: bytes kept free in memory that the host uses too, None for the default.

    Raises:
        ConfigError: `--device cuda` without a usable GPU, or a budget that cannot be had.
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
    memory = _gpu_memory(host_reserve) if device == "cuda" else host_memory(host_reserve)
    budget = memory_budget(memory, utilization, config.memory_budget)
    if config.memory_budget is None:
        notes.append(f"memory-budget auto is {format_bytes(budget.bytes)}, {budget.why}")
    finished = replace(
        config, device=device, dtype=dtype, memory_budget=budget.bytes, device_memory=memory
    )
    return finished, notes


def check_early(
    config: EngineConfig, utilization: float | None = None, host_reserve: int | None = None
) -> None:
    """Refuse what needs no torch to be refused, before a process is started.

    The files of the checkpoint always; on a CPU what does not fit too. The engine process measures
    again.

    Raises:
        ModelFormatError: a file of the checkpoint is missing or corrupt.
        ConfigError, DoesNotFitError: the settings cannot work.
    """
    if config.device == "auto" and not _gpu_possible():
        config = replace(config, device="cpu")
    if config.device == "cpu":
        finished, _ = finish_config(config, utilization, host_reserve)
        preflight_of(finished, load_config(Path(config.model_dir)))
    else:
        served_tensors(Path(config.model_dir))


def _gpu_possible() -> bool:
    return sys.platform != "linux" or any(Path(node).exists() for node in _GPU_NODES)


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


def _gpu_memory(host_reserve: int | None) -> DeviceMemory:
    import torch

    free, total = torch.cuda.mem_get_info()
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return gpu_memory(
        int(free),
        int(total),
        host_memory(host_reserve),
        integrated=bool(getattr(properties, "is_integrated", False)),
        own_context=CUDA_CONTEXT,
    )
