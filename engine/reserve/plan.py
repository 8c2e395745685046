"""What a model would take on a device that need not be here. Uses no torch and opens no socket.

Prints nothing; `spark_server.plan` does.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.errors import ConfigError, ModelFormatError
from engine.reserve.memory import Budget, DeviceMemory, memory_budget
from engine.reserve.parameters import (
    ResidentPart,
    StoredTensor,
    resident_parts,
    tensors_of_config,
    tensors_of_headers,
)
from engine.reserve.preflight import (
    FurtherTerms,
    Preflight,
    ReserveCase,
    largest,
    preflight_reserve,
    smallest_share,
)
from engine.reserve.ssm_reserve import SpeculationPolicy, SsmRollbackMode
from engine.weights.headers import TensorHeader, tensor_headers
from engine.weights.model_config import ModelConfig, load_config, parse_config

# The widest batch that the settings accept.
WIDEST_BATCH = 4096
# Drafts that the comparison of rollback modes assumes when the plan itself has none.
USUAL_DRAFTS = 3


@dataclass(frozen=True, slots=True)
class PlanCase:
    """One question: this model with these settings on that memory.

    Attributes:
        reserve: everything that the terms are computed from but the configuration.
        config: `model_dir` is not read; an explicit `memory_budget` wins over `share`.
        memory: what the device has and others hold.
        share: of it that the engine may take, None for the device's default.
        parts: what the weights are made of; empty when their bytes were given.
    """

    reserve: ReserveCase
    config: EngineConfig
    memory: DeviceMemory
    share: float | None
    parts: tuple[ResidentPart, ...]

    @property
    def budget(self) -> Budget:
        """Bytes that the engine may take.

        Raises:
            ConfigError: the device cannot give them.
        """
        return memory_budget(self.memory, self.share, self.config.memory_budget)

    def preflight(self) -> Preflight:
        """The very preflight of a start.

        Raises:
            DoesNotFitError: names the largest term and what would fit.
        """
        reserve = self.reserve
        return preflight_reserve(
            reserve.model,
            self.config,
            budget=self.budget.bytes,
            weights_bytes=reserve.weights_bytes,
            policy=reserve.policy,
            memory=self.memory,
            further=reserve.further,
        )


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """How far each setting goes with the others held; None where not even the least fits.

    Attributes:
        max_batch_size: the highest, with KV for one sequence of full length.
        max_seq_len: the longest, at most what the model allows.
        lowest_share: the smallest utilisation that holds the settings, in steps of 0.01.
        highest_share: beyond it the device gives no more.
    """

    max_batch_size: int | None
    max_seq_len: int | None
    lowest_share: float | None
    highest_share: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON, under the names of the settings."""
        return {
            "max_batch_size": self.max_batch_size,
            "max_seq_len": self.max_seq_len,
            "gpu_memory_utilization": {"lowest": self.lowest_share, "highest": self.highest_share},
        }


@dataclass(frozen=True, slots=True)
class ModePlan:
    """One rollback mode, or none, with everything else held.

    Attributes:
        mode: `off`, `carry`, `replay` or `snapshot`.
        without_kv: bytes of all terms but the KV pool and its dummy.
        kv_tokens: that the pool holds, None when the settings do not fit.
        lowest_share: the smallest utilisation that holds the settings, None when none does.
    """

    mode: str
    without_kv: int
    kv_tokens: int | None
    lowest_share: float | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "mode": self.mode,
            "bytes_without_kv": self.without_kv,
            "kv_tokens": self.kv_tokens,
            "lowest_gpu_memory_utilization": self.lowest_share,
        }


def plan_case(
    source: Path,
    config: EngineConfig,
    memory: DeviceMemory,
    *,
    share: float | None = None,
    weights_bytes: int | None = None,
    policy: SpeculationPolicy | None = None,
    further: FurtherTerms = lambda config: (),
) -> PlanCase:
    """The question about a model folder or about a config.json alone.

    Args:
        source: folder, whose safetensors headers count if it has any, or path of a config.json.
        config, memory, share: see PlanCase.
        weights_bytes: stands in for the network's bytes in memory.
        policy, further: see preflight_reserve.

    Raises:
        ModelFormatError: the model cannot be served, or the folder's weights cannot be read.
        ConfigError: the length exceeds the model's, or there is no drafter.
    """
    model = read_model(source)
    if config.max_seq_len > model.max_position_embeddings:
        raise ConfigError(
            f"--max-seq-len {config.max_seq_len} exceeds the {model.max_position_embeddings} "
            f"positions of the model; use {model.max_position_embeddings} or less"
        )
    policy = policy or SpeculationPolicy()
    with_mtp = policy.num_drafts > 0
    if with_mtp and model.mtp_layers == 0:
        raise ConfigError("--num-drafts needs a model with MTP layers, and this one has none")
    parts: tuple[ResidentPart, ...] = ()
    if weights_bytes is None:
        stored = checkpoint_tensors(source, model)
        parts = resident_parts(stored, model, config, with_mtp=with_mtp)
        weights_bytes = sum(part.nbytes for part in parts)
    reserve = ReserveCase(model, weights_bytes, policy, further)
    return PlanCase(reserve, config, memory, share, parts)


def plan_limits(case: PlanCase) -> PlanLimits:
    """Each setting's limit by bisection, the others held."""
    config, reserve, budget = case.config, case.reserve, case.budget.bytes

    def fits(trial: EngineConfig) -> bool:
        return reserve.needed(trial) <= budget

    return PlanLimits(
        max_batch_size=largest(WIDEST_BATCH, 1, lambda n: fits(replace(config, max_batch_size=n))),
        max_seq_len=largest(_longest(case), 1, lambda n: fits(replace(config, max_seq_len=n))),
        lowest_share=_lowest_share(case, reserve),
        highest_share=min(case.memory.limit * 100 // case.memory.total, 100) / 100,
    )


def _longest(case: PlanCase) -> int:
    """Of the model, and of an explicit KV pool, which must hold one whole sequence."""
    allowed = case.reserve.model.max_position_embeddings
    tokens = case.config.kv_tokens
    return allowed if tokens is None else min(allowed, tokens)


def _lowest_share(case: PlanCase, reserve: ReserveCase) -> float | None:
    needed = reserve.needed(case.config)
    return smallest_share(needed, case.memory.total) if needed <= case.memory.limit else None


def rollback_modes(case: PlanCase, weights_of: Callable[[bool], int]) -> tuple[ModePlan, ...]:
    """No speculation and every rollback mode side by side; nothing for a model without a drafter.

    Args:
        weights_of: bytes of the network with the drafter, or without it.
    """
    reserve = case.reserve
    if reserve.model.mtp_layers == 0:
        return ()
    drafts = reserve.policy.num_drafts or USUAL_DRAFTS
    policies = {"off": replace(reserve.policy, num_drafts=0)} | {
        mode.value: replace(reserve.policy, num_drafts=drafts, rollback=mode)
        for mode in (SsmRollbackMode.CARRY, SsmRollbackMode.REPLAY, SsmRollbackMode.SNAPSHOT)
    }
    found = []
    for name, policy in policies.items():
        weights = weights_of(policy.num_drafts > 0)
        one = replace(reserve, policy=policy, weights_bytes=weights)
        fits = one.needed(case.config) <= case.budget.bytes
        ledger = one.ledger(case.config, 0)
        found.append(
            ModePlan(
                name,
                ledger.total - ledger.bytes_of("kv_dummy"),
                replace(case, reserve=one).preflight().kv_tokens if fits else None,
                _lowest_share(case, one),
            )
        )
    return tuple(found)


def read_model(source: Path) -> ModelConfig:
    """The config of a model folder, or of a config.json that lies alone.

    Raises:
        ModelFormatError: it or its weights cannot be read, or the model cannot be served.
    """
    if not source.is_file():
        _headers(source)
        return load_config(source)
    try:
        parsed = json.loads(source.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFormatError(f"{source} cannot be read as JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ModelFormatError(f"{source} holds no JSON object")
    return parse_config(parsed)


def checkpoint_tensors(source: Path, model: ModelConfig) -> tuple[StoredTensor, ...]:
    """The tensors of a folder by their headers, or those that a config without weights stands for.

    Raises:
        ModelFormatError: there are weights, or an index of them, and they cannot be read.
    """
    headers = _headers(source)
    return tensors_of_headers(headers) if headers else tensors_of_config(model)


def _headers(source: Path) -> dict[str, TensorHeader]:
    """Of a folder's tensors; none for a config.json, whatever lies beside it."""
    if not source.is_dir():
        return {}
    try:
        return tensor_headers(source)
    except ModelFormatError as error:
        alone = source / "config.json"
        raise ModelFormatError(f"{error}, or plan without its weights from {alone}") from error
