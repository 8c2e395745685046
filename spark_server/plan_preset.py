"""A preset or settings file as the words of `spark plan` that it stands for.

Reads it as the server would, with pydantic, so that it is imported only when a preset is asked for.
"""

from __future__ import annotations

from engine.errors import ConfigError


def preset_words(path: str, *, with_budget: bool) -> list[str]:
    """The words of a TOML settings file; what a plan has no use for is left out.

    Args:
        with_budget: its budget or share too, which the command line may replace.

    Raises:
        ConfigError: the file cannot be read or holds what is no setting.
    """
    from spark_server.settings import load_settings

    settings = load_settings(["--config", path], {}).settings
    model, memory, batching = settings.model, settings.memory, settings.batching
    speculation = settings.speculation
    flags: dict[str, object] = {
        "--device": None if model.device == "auto" else model.device,
        "--dtype": None if model.dtype == "auto" else model.dtype,
        "--kernels": model.kernels,
        "--max-batch-size": batching.max_batch_size,
        "--max-seq-len": batching.max_seq_len,
        "--max-prefill-tokens": batching.max_prefill_tokens,
        "--host-reserve": memory.host_reserve,
        "--kv-tokens": memory.kv_tokens,
        "--ssm-cache-slots": settings.prefix_cache.slots.slots,
        "--ssm-decode-ring-slots": settings.watchdogs.ssm_decode_ring_slots,
        "--ssm-h-dtype": memory.ssm_h_dtype,
    }
    if with_budget:
        flags["--gpu-memory-utilization"] = memory.gpu_memory_utilization
        flags["--memory-budget"] = memory.memory_budget
    if speculation.speculative:
        policy = speculation.policy(recurrent=True)
        assert policy is not None
        if policy.ladder_explicit:
            raise ConfigError(f"{path}: a plan knows the default ladder and none, no other")
        flags |= {
            "--num-drafts": policy.num_drafts,
            "--ssm-rollback-mode": policy.rollback.value,
            "--mtp-max-seqs": policy.mtp_max_seqs,
        }
    words = [model.model]
    for flag, value in flags.items():
        words += [] if value is None else [flag, str(value)]
    return words
