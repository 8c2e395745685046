"""The preflight of a start: a resolved configuration and the headers of its checkpoint."""

from __future__ import annotations

from pathlib import Path

from engine.config import EngineConfig
from engine.errors import ConfigError, ModelFormatError
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
    """What an engine of `config` reserves, weights by the headers of its files.

    Args:
        config: device, dtype and memory budget are resolved.
        model: of the same folder.
        from_files: the weights come from the folder; else they are made as the config describes.

    Raises:
        ConfigError, DoesNotFitError: the settings cannot work.
        ModelFormatError: the checkpoint cannot be served.
    """
    if config.memory_budget is None:
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
    return preflight_reserve(
        model,
        config,
        budget=config.memory_budget,
        weights_bytes=resident_bytes(stored, model, config, with_mtp=with_mtp),
        policy=policy,
        memory=config.device_memory,
    )


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
