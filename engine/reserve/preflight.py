"""Whether a model fits a memory budget, and how many KV blocks that leaves, before the weights.

Reads no file and no machine: all numbers come in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from engine.config import GRID, EngineConfig
from engine.errors import ConfigError, DoesNotFitError
from engine.reserve.ledger import LedgerTerm, MemoryLedger
from engine.reserve.memory import DeviceMemory
from engine.reserve.sizes import format_bytes
from engine.reserve.ssm_reserve import SpeculationPolicy
from engine.reserve.terms import (
    Speculation,
    blocks_per_sequence,
    fixed_terms,
    kv_block_bytes,
    kv_terms,
)
from engine.reserve.verify_terms import decode_ring_terms, snapshot_terms, verify_terms
from engine.weights.model_config import ModelConfig

# Terms of other owners, such as snapshots: a search varies the configuration, and they follow.
FurtherTerms = Callable[[EngineConfig], tuple[LedgerTerm, ...]]

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Preflight:
    """A plan that fits.

    Attributes:
        ledger: every term; its total is at most `budget`.
        kv_blocks: blocks of GRID tokens that sequences may own.
        budget: bytes that the engine may take.
        free: bytes of the budget that no term takes.
    """

    ledger: MemoryLedger
    kv_blocks: int
    budget: int
    free: int

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV pool holds."""
        return self.kv_blocks * GRID

    def as_dict(self) -> dict[str, Any]:
        """The ledger's JSON values with the budget, what is free of it, and the KV pool's size."""
        return {
            **self.ledger.as_dict(),
            "budget_bytes": self.budget,
            "free_bytes": self.free,
            "kv_blocks": self.kv_blocks,
            "kv_tokens": self.kv_tokens,
        }


@dataclass(frozen=True, slots=True)
class ReserveCase:
    """All inputs of one preflight but the settings that a search varies.

    Attributes:
        model: shapes.
        weights_bytes: of the network in memory, see `parameters.resident_bytes`.
        policy: of speculation.
        further: terms of other owners.
    """

    model: ModelConfig
    weights_bytes: int
    policy: SpeculationPolicy
    further: FurtherTerms

    @property
    def with_mtp(self) -> bool:
        """The drafter runs and has a KV layer."""
        return self.policy.num_drafts > 0

    def ledger(self, config: EngineConfig, blocks: int) -> MemoryLedger:
        """Every term with a KV pool of `blocks` blocks."""
        drafts, slots = self.policy.num_drafts, self.policy.ring_slots(config.max_batch_size)
        speculation = Speculation(self.with_mtp, drafts, slots)
        return MemoryLedger(
            (
                *fixed_terms(self.model, config, self.weights_bytes, speculation),
                *verify_terms(self.model, config, self.policy),
                *snapshot_terms(self.model, config, self.policy),
                *decode_ring_terms(self.model, config),
                *self.further(config),
                *kv_terms(self.model, config, blocks, with_mtp=self.with_mtp),
            )
        )

    def needed(self, config: EngineConfig) -> int:
        """Bytes with the smallest KV pool that is allowed; rises with batch and length."""
        return self.least(config).total

    def least(self, config: EngineConfig) -> MemoryLedger:
        """The ledger with the smallest KV pool that is allowed."""
        return self.ledger(config, fewest_blocks(config))


def preflight_reserve(
    model: ModelConfig,
    config: EngineConfig,
    *,
    budget: int,
    weights_bytes: int,
    policy: SpeculationPolicy | None = None,
    memory: DeviceMemory | None = None,
    further: FurtherTerms = lambda config: (),
) -> Preflight:
    """Every byte that the engine will take, and the KV pool that the rest of the budget pays for.

    The KV pool takes `config.kv_tokens`, or what is left: all of it on a GPU, on a CPU at most
    max_batch_size sequences of max_seq_len.

    Args:
        model: shapes.
        config: device and dtype resolved.
        budget: bytes in all.
        weights_bytes: of the network in memory, see `parameters.resident_bytes`.
        policy: of speculation, None for none; with drafts the drafter runs and has a KV layer.
        memory: of the device, to name budgets and shares that it can really give.
        further: terms of other owners for a configuration, such as snapshots.

    Raises:
        DoesNotFitError: not even one sequence of full length fits, or the asked KV pool does not;
            names the largest term, both numbers, and the nearest settings that fit.
        ConfigError: `kv_tokens` holds less than one sequence.
    """
    case = ReserveCase(model, weights_bytes, policy or SpeculationPolicy(), further)
    _check_kv_tokens(config)
    if case.needed(config) > budget:
        raise DoesNotFitError(_refusal(case, config, budget, memory))
    blocks = fewest_blocks(config)
    if config.kv_tokens is None:
        block = kv_block_bytes(model, config, with_mtp=case.with_mtp)
        blocks = _most_blocks(config, budget - case.ledger(config, 0).total, block)
    ledger = case.ledger(config, blocks)
    return Preflight(ledger, blocks, budget, budget - ledger.total)


def fewest_blocks(config: EngineConfig) -> int:
    """Blocks of the smallest KV pool that is allowed: one sequence's, or as many as were asked."""
    if config.kv_tokens is not None:
        return -(-config.kv_tokens // GRID)
    return blocks_per_sequence(config)


def _most_blocks(config: EngineConfig, left: int, block: int) -> int:
    useful = config.max_batch_size * blocks_per_sequence(config)
    if block == 0:
        return useful
    affordable = left // block
    # A GPU has nothing else to do with its memory; a CPU has other tenants.
    return affordable if config.device == "cuda" else min(affordable, useful)


def _check_kv_tokens(config: EngineConfig) -> None:
    if config.kv_tokens is not None and fewest_blocks(config) < blocks_per_sequence(config):
        raise ConfigError(
            f"--kv-tokens {config.kv_tokens} is less than one sequence of --max-seq-len "
            f"{config.max_seq_len}; raise the first or lower the second"
        )


def _refusal(
    case: ReserveCase, config: EngineConfig, budget: int, memory: DeviceMemory | None
) -> str:
    ledger = case.least(config)
    most = ledger.largest()
    text = (
        f"the model needs {ledger.total} bytes ({format_bytes(ledger.total)}) and the budget is "
        f"{budget} bytes ({format_bytes(budget)}); the largest term is {most.name} with "
        f"{format_bytes(most.bytes)} ({most.why}); what would fit: "
    )
    return text + "; ".join(_ways_out(case, config, budget, memory))


def _ways_out(
    case: ReserveCase, config: EngineConfig, budget: int, memory: DeviceMemory | None
) -> list[str]:
    """The nearest settings that fit, one at a time, found through the same ledger."""
    ways = []

    def fits(trial: EngineConfig) -> bool:
        return case.needed(trial) <= budget

    batch = largest(config.max_batch_size, 1, lambda n: fits(replace(config, max_batch_size=n)))
    if batch is not None:
        ways.append(f"--max-batch-size {batch} at this length")
    blocks = blocks_per_sequence(config) - 1
    length = largest(blocks, 1, lambda n: fits(replace(config, max_seq_len=n * GRID)))
    if length is not None and config.kv_tokens is None:
        ways.append(f"--max-seq-len {length * GRID} at this batch size")
    slots = largest(config.snapshot_slots - 1, 0, lambda n: fits(replace(config, snapshot_slots=n)))
    if slots is not None:
        ways.append(f"--ssm-cache-slots {slots}")
    depth = (config.decode_ring_slots or 0) - 1
    depth_that_fits = largest(depth, 0, lambda n: fits(replace(config, decode_ring_slots=n)))
    if depth_that_fits is not None:
        ways.append(f"--ssm-decode-ring-slots {depth_that_fits}")
    least = replace(config, kv_tokens=None)
    if config.kv_tokens is not None and fits(least):
        left = budget - case.ledger(least, 0).total
        tokens = left // kv_block_bytes(case.model, config, with_mtp=case.with_mtp) * GRID
        ways.append(f"--kv-tokens {tokens}")
    needed = case.needed(config)
    if memory is not None and needed > memory.limit:
        ways.append(_more_memory(needed, memory))
    else:
        ways.append(f"--memory-budget {-(-needed // _MIB)}MiB")
        if memory is not None:
            ways.append(f"--gpu-memory-utilization {smallest_share(needed, memory.total):.2f}")
    return ways


def _more_memory(needed: int, memory: DeviceMemory) -> str:
    if needed <= memory.total - memory.reserve:
        return f"ending what else holds {format_bytes(memory.others)} of the memory"
    return f"a device with more memory than {format_bytes(memory.total)}"


def smallest_share(needed: int, total: int) -> float:
    """The smallest share in steps of 0.01 whose budget holds `needed`."""
    percent = -(-needed * 100 // total)
    return (percent if int(total * (percent / 100)) >= needed else percent + 1) / 100


def largest(high: int, low: int, fits: Callable[[int], bool]) -> int | None:
    """The largest n in [low, high] that fits, by bisection; None when not even `low` does."""
    if high < low or not fits(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
