"""The engine's frozen configuration, as handed over by the settings. Reads no environment."""

from __future__ import annotations

from dataclasses import dataclass

from engine.reserve.memory import DeviceMemory
from engine.speculation.policy import PolicySettings

# One grid for all that must line up: prefill chunks end on it (the chunked GDN algorithm is bitwise
# reproducible only when split there), KV blocks have this many tokens, checkpoints sit on it.
GRID = 64


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How to run one model on one device. Sizes in bytes, lengths in tokens.

    Attributes:
        model_dir: a local folder with config.json and safetensors.
        device: `cpu` or `cuda`.
        dtype: activations' type, `float32`, `bfloat16` or `float16`.
        max_batch_size: sequences that run at once; one state slot each.
        max_seq_len: prompt and output together, per sequence.
        max_prefill_tokens: prompt rows that one step may carry; a multiple of GRID.
        max_waiting: requests that may queue before a new one is refused.
        memory_budget: bytes that the whole engine may take; what the ledger must fit into.
        device_memory: what the device has and can give, to say in a refusal; None if not known.
        kv_tokens: explicit size of the KV pool, or None to take what the budget leaves.
        threads: CPU threads at most.
        kernels: `auto`, `naive`, `cpu` or `triton`.
        batch_invariant: products whose rows have the same bits at every batch size on a GPU too; on
            a CPU they always have.
        enforce_eager: no CUDA graphs.
        slot_compaction: move the highest survivor onto the lowest free slot at retirement.
        speculation: how to speculate, or None to plain-decode.
        prefix_caching: reuse KV and state of prefixes that earlier sequences computed.
        snapshot_slots: states that are kept for it; 0 keeps none, so that nothing is reused.
        prefix_cache_exact: reuse only what gives the very tokens that no reuse gives.
        watchdogs: look for output that repeats itself, and steer it back or stop it.
        decode_ring_slots: snapshots of each sequence to roll back to, None to take what fits.
        decode_ring_override: ATLAS_SSM_DECODE_RING, see `reserve.decode_ring`.
        h_f16_pool: recurrent h states are stored in float16.
    """

    model_dir: str
    device: str = "cpu"
    dtype: str = "float32"
    max_batch_size: int = 32
    max_seq_len: int = 4096
    max_prefill_tokens: int = 512
    max_waiting: int = 1024
    memory_budget: int | None = None
    device_memory: DeviceMemory | None = None
    kv_tokens: int | None = None
    threads: int = 0
    kernels: str = "auto"
    batch_invariant: bool = False
    enforce_eager: bool = False
    slot_compaction: bool = True
    speculation: PolicySettings | None = None
    prefix_caching: bool = False
    snapshot_slots: int = 0
    prefix_cache_exact: bool = True
    watchdogs: bool = False
    decode_ring_slots: int | None = None
    decode_ring_override: str | None = None
    h_f16_pool: bool = False
