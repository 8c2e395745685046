"""The preflight of a start: a resolved configuration and the headers of its checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engine.config import EngineConfig
from engine.errors import ConfigError, ModelFormatError
from engine.reserve.decode_ring import DecodeRingDecision
from engine.reserve.decode_ring_fit import decode_ring_slots
from engine.reserve.parameters import (
    StoredTensor,
    resident_bytes,
    tensors_of_config,
    tensors_of_headers,
)
from engine.reserve.preflight import Preflight, preflight_reserve
from engine.reserve.ssm_reserve import SpeculationPolicy
from engine.weights.headers import tensor_headers
from engine.weights.model_config import ModelConfig


def preflight_of(config: EngineConfig, model: ModelConfig, *, from_files: bool = True) -> Preflight:
    """What an engine of `config` reserves; see `preflight_with_ring`."""
    return preflight_with_ring(config, model, from_files=from_files)[0]


def preflight_with_ring(
    config: EngineConfig, model: ModelConfig, *, from_files: bool = True
) -> tuple[Preflight, DecodeRingDecision]:
    """What an engine of `config` reserves, and how deep its decode-rollback ring is in that.

    Args:
        config: device, dtype and memory budget are resolved.
        model: of the same folder.
        from_files: weights by the headers of the folder's files; else they are made as the config
            describes.

    Raises:
        ConfigError, DoesNotFitError: the settings cannot work.
        ModelFormatError: the checkpoint cannot be served.
    """
    budget = config.memory_budget
    if budget is None:
        raise ConfigError("the memory budget is not resolved")
    policy = reserve_policy(config)
    with_mtp = policy.num_drafts > 0
    if with_mtp and model.mtp_layers == 0:
        raise ConfigError(
            f"--speculative needs a drafter and {config.model_dir} has no mtp.* tensors; "
            "leave --speculative out or serve a checkpoint with its MTP head"
        )
    folder = Path(config.model_dir)
    stored = served_tensors(folder) if from_files else tensors_of_config(model)
    weights = resident_bytes(stored, model, config, with_mtp=with_mtp)

    def reserve(ring_slots: int) -> Preflight:
        return preflight_reserve(
            model,
            replace(config, decode_ring_slots=ring_slots),
            budget=budget,
            weights_bytes=weights,
            policy=policy,
            memory=config.device_memory,
        )

    ring = decode_ring_slots(model, config, reserve)
    return reserve(ring.slots), ring


def served_tensors(folder: Path) -> tuple[StoredTensor, ...]:
    """Every tensor of a checkpoint that is to be loaded, by its headers.

    Raises:
        ModelFormatError: there are none, or a file is missing or corrupt.
    """
    stored = tensors_of_headers(tensor_headers(folder))
    if not stored:
        raise ModelFormatError(
            f"{folder} holds no safetensors file with weights; download the model again"
        )
    return stored


def reserve_policy(config: EngineConfig) -> SpeculationPolicy:
    """What the ledger and the pools must know of speculation; no drafts when it is off."""
    return config.speculation.reserve if config.speculation else SpeculationPolicy(0)
