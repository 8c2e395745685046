"""Which depth of the decode-rollback ring a model's preflight comes to.

Knows no watchdog; the rules of who decides are in `decode_ring`.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.config import EngineConfig
from engine.reserve.decode_ring import (
    DecodeRingDecision,
    DecodeRingDepth,
    decode_rollback_ring_slots_with,
    fit_decode_ring_slots,
)
from engine.reserve.preflight import Preflight
from engine.reserve.terms import KV_POOL, WEIGHTS
from engine.reserve.verify_terms import decode_ring_slot_bytes
from engine.weights.model_config import ModelConfig

Reserve = Callable[[int], Preflight]


def decode_ring_slots(
    model: ModelConfig, config: EngineConfig, reserve: Reserve
) -> DecodeRingDecision:
    """Who decides the depth, and how deep it then is.

    An explicit depth stands whether it fits or not. Any other is fitted against what will be left
    after the weights and everything else, half of the KV pool that there would be without a ring
    included, so that the ring never starves it.

    Args:
        reserve: the preflight with a ring of that depth.

    Raises:
        DoesNotFitError: the model does not fit without a ring.
    """
    depth = DecodeRingDepth()
    if config.decode_ring_slots is not None:
        depth.set_decode_ring_slots(config.decode_ring_slots)
    decision = decode_rollback_ring_slots_with(
        model.gdn_layers,
        config.speculation is not None,
        depth.published,
        config.decode_ring_override,
        not config.watchdogs,
    )
    if decision.slots == 0 or depth.published is not None:
        return decision
    without = reserve(0)
    weights = without.ledger.bytes_of(WEIGHTS)
    fitted = fit_decode_ring_slots(
        decision.slots,
        without.ledger.total - without.ledger.bytes_of(KV_POOL) // 2 - weights,
        decode_ring_slot_bytes(model, config),
        without.budget - weights,
    )
    in_force = depth.set_decode_ring_slots(fitted)
    return DecodeRingDecision(
        in_force, None if in_force else "not even one snapshot of every sequence fits"
    )
