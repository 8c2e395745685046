"""Random weights against the shapes that a checkpoint's tensors must have."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.geometries import geometry
from benchmarks.gpu.weights import RandomWeights
from engine.build import build_engine
from engine.config import EngineConfig
from engine.reserve.parameters import tensors_of_config
from engine.speculation.policy import PolicySettings
from engine.weights.layout import MoeWeights
from engine.weights.model_config import parse_config

MINIATURE = geometry("miniature-3")
MOE = MINIATURE | {
    "model_type": "qwen3_5_moe_text",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


def elements(value: Any) -> int:
    """Numbers in all tensors of a nested frozen value."""
    if isinstance(value, torch.Tensor):
        return value.numel()
    fields = getattr(value, "__dataclass_fields__", {})
    return sum(elements(getattr(value, name)) for name in fields)


@pytest.mark.parametrize("text", [MINIATURE, MOE])
@pytest.mark.parametrize("tied", [False, True])
def test_every_number_of_a_checkpoint_is_there(text: dict[str, Any], tied: bool) -> None:
    config = replace(parse_config(text), tie_word_embeddings=tied)
    source = RandomWeights(config, torch.device("cpu"), torch.bfloat16)
    head, mtp = source.lm_head(), source.mtp()
    assert (head is None) is tied
    assert mtp is not None
    total = source.embed().numel() + source.norm().numel() + elements(mtp) + elements(head)
    total += sum(elements(source.layer(i)) for i in range(len(config.layer_kinds)))
    assert total == sum(tensor.elements for tensor in tensors_of_config(config))
    layer = source.layer(0)
    assert isinstance(layer.mlp, MoeWeights) == bool(config.num_experts)


def test_the_same_seed_gives_the_same_numbers() -> None:
    config, cpu = parse_config(MINIATURE), torch.device("cpu")
    first, same, other = (
        RandomWeights(config, cpu, torch.float32, seed).embed() for seed in (1, 1, 2)
    )
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_an_engine_is_built_of_them_with_no_weight_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MINIATURE), encoding="utf-8")
    config = EngineConfig(
        str(tmp_path),
        max_batch_size=2,
        max_seq_len=128,
        max_prefill_tokens=64,
        memory_budget=2**30,
        threads=1,
        kernels="naive",
        speculation=PolicySettings(num_drafts=2),
    )
    built = build_engine(
        config,
        lambda phase, seconds, detail="": None,
        source=lambda model: RandomWeights(model, torch.device("cpu"), torch.float32),
    )
    assert built.model.network.mtp is not None
    assert built.model.drafter is not None
    assert built.info.vocab_size == MINIATURE["vocab_size"]
