"""Builds engines of random configurations and counts what they hold, without asking a ledger.

Run as `python -m tests.engine.live_tensors FOLDER SEED...` in a process of its own; prints one line
of JSON per seed. Live tensors are found through the garbage collector.
"""

from __future__ import annotations

import ctypes
import gc
import json
import random
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import save_file

from engine.build import BuiltEngine, build_engine
from engine.config import EngineConfig
from engine.reserve.parameters import tensors_of_config
from engine.reserve.ssm_reserve import SsmRollbackMode
from engine.speculation.policy import ControllerMode, PolicySettings
from engine.weights.model_config import parse_config
from kernels.linear.cpu import Float32Linear, Fp16Linear

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FAMILIES = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
MODES = (None, SsmRollbackMode.CARRY, SsmRollbackMode.REPLAY, SsmRollbackMode.SNAPSHOT)
# Large enough that what malloc and the interpreter do beside it is below 5 percent.
GROWTH_TOKENS = 400000


def objects(*kinds: type) -> list[Any]:
    """Every live object of these types."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # looking at an object may wake what torch has deprecated
        return [item for item in gc.get_objects() if isinstance(item, kinds)]


def storages() -> dict[int, int]:
    """Bytes of every live tensor's storage by address; opaque forms (oneDNN's) have none."""
    found = {}
    for tensor in objects(torch.Tensor):
        if tensor.layout is torch.strided and tensor.untyped_storage().nbytes():
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return found


def packed_bytes() -> int:
    """Bytes of packed matrices, which are no strided tensors."""
    packed = objects(Fp16Linear, Float32Linear)
    return sum({id(linear.packed): linear.nbytes for linear in packed}.values())


def geometry(rng: random.Random, family: str) -> dict[str, Any]:
    """A random config.json of small sizes."""
    values: dict[str, Any] = {
        "model_type": family,
        "vocab_size": rng.choice([32, 80, 200]),
        "hidden_size": rng.choice([16, 32, 48]),
        "num_hidden_layers": rng.choice([4, 5, 8]),
        "num_attention_heads": 4,
        "num_key_value_heads": rng.choice([1, 2]),
        "head_dim": rng.choice([16, 32]),
        "linear_num_key_heads": 2,
        "linear_num_value_heads": rng.choice([2, 4, 6]),
        "linear_key_head_dim": rng.choice([8, 16]),
        "linear_value_head_dim": rng.choice([8, 16]),
        "max_position_embeddings": 4096,
        "tie_word_embeddings": rng.choice([True, False]),
        "mtp_num_hidden_layers": 1,
        "dtype": rng.choice(["float32", "bfloat16"]),
        "eos_token_id": 2,
    }
    if family == "qwen3_5_text":
        return values | {"intermediate_size": rng.choice([24, 40])}
    return values | {
        "num_experts": rng.choice([3, 4]),
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 12,
    }


def case(seed: int, folder: Path) -> EngineConfig:
    """Writes a checkpoint and says how to run it; every third seed is of another family."""
    rng = random.Random(seed)
    values = geometry(rng, FAMILIES[seed % 3])
    model = parse_config(values)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    tensors = {
        t.name: (torch.randn(t.shape) * 0.05).to(DTYPES[t.dtype]) for t in tensors_of_config(model)
    }
    save_file(tensors, folder / "model.safetensors")
    mode = MODES[seed % 4]
    policy = None
    if mode is not None:
        drafts = rng.randint(1, 4)
        full = rng.random() < 0.3
        policy = PolicySettings(
            num_drafts=drafts,
            rollback=mode,
            pool_full_width=full,
            controller=ControllerMode.OFF,  # it would time steps at the start
            recurrent=True,
        )
    length, snapshots = rng.randint(70, 2000), rng.choice([0, 3, 16])
    ring = 0 if mode is not None else rng.choice([1, 8])
    return EngineConfig(
        str(folder),
        dtype="bfloat16" if seed % 5 == 4 else "float32",
        max_batch_size=rng.randint(1, 70),
        max_seq_len=length,
        memory_budget=8 * 2**30,
        kv_tokens=rng.choice([None, length + 1000]),
        threads=1,
        kernels="auto" if seed % 5 == 4 or seed % 2 else "naive",
        speculation=policy,
        prefix_caching=snapshots > 0,
        snapshot_slots=snapshots,
        watchdogs=ring > 0,
        decode_ring_slots=ring,
        h_f16_pool=seed % 4 == 2,
    )


def build(config: EngineConfig) -> BuiltEngine:
    """An engine, warmed up."""
    return build_engine(config, lambda phase, seconds, detail="": None)


def resident() -> int:
    """Resident bytes, after what is free was given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


def measure(seed: int, folder: Path) -> dict[str, Any]:
    """What one configuration holds, and how resident memory grows with large pools."""
    config = case(seed, folder)
    gc.collect()
    before, packed_before = storages(), packed_bytes()
    built = build(config)
    gc.collect()
    after = storages()
    ledger = built.ledger.ledger
    found = {
        "seed": seed,
        "config": f"{config.kernels} {config.dtype} {config.speculation and MODES[seed % 4]}",
        "live": sum(size for place, size in after.items() if place not in before),
        "packed": packed_bytes() - packed_before,
        "kernels": built.info.kernels,
        "exact": ledger.exact,
        "weights": ledger.bytes_of("weights"),
    }
    del built
    large = replace(config, kv_tokens=GROWTH_TOKENS * 64 // (64 + config.max_batch_size // 2))
    start = resident()
    built = build(large)
    ledger = built.ledger.ledger
    found |= {"growth": resident() - start, "reserved": ledger.exact + ledger.bytes_of("weights")}
    return found


if __name__ == "__main__":
    for number in sys.argv[2:]:
        print(json.dumps(measure(int(number), Path(sys.argv[1]) / number)), flush=True)
