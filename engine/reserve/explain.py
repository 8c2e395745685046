"""How a ledger term comes about: its formula in words, and the same with the numbers put in.

Computes no term: the ledger does, and a test holds the two equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.config import GRID, EngineConfig
from engine.errors import ConfigError
from engine.pools.shapes import FLOAT16_BYTES, FLOAT32_BYTES, LOG_ROWS
from engine.reserve import graphs as g
from engine.reserve import terms as t
from engine.reserve import verify_terms as v
from engine.reserve.ledger import LedgerTerm, MemoryLedger
from engine.reserve.parameters import (
    ResidentPart,
    element_bytes,
    product_scratch_bytes,
    uses_cpu_kernels,
)
from engine.reserve.preflight import ReserveCase
from engine.reserve.ssm_reserve import (
    SpeculationPolicy,
    SsmRollbackMode,
    mtp_slot_draft_capacity,
    ssm_blob,
)
from engine.weights.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Explanation:
    """One term explained.

    Attributes:
        term: with its bytes.
        words: the formula.
        numbers: the formula with the numbers of this plan, as arithmetic that gives the bytes.
    """

    term: LedgerTerm
    words: str
    numbers: str


@dataclass(frozen=True, slots=True)
class _Numbers:
    """What the formulas are made of, under short names."""

    model: ModelConfig
    config: EngineConfig
    policy: SpeculationPolicy
    blocks: int
    parts: tuple[ResidentPart, ...]

    @property
    def batch(self) -> int:
        return self.config.max_batch_size

    @property
    def drafts(self) -> int:
        return self.policy.num_drafts

    @property
    def covered(self) -> int:
        return self.policy.covered(self.batch)

    @property
    def h(self) -> str:
        m = self.model
        return f"{m.linear_num_value_heads} * {m.linear_key_head_dim} * {m.linear_value_head_dim}"

    @property
    def conv(self) -> str:
        return f"{self.model.conv_dim} * {self.model.linear_conv_kernel_dim}"

    @property
    def blob(self) -> str:
        h, conv = f"{self.h} * {self.h_width}", f"{self.conv} * {FLOAT32_BYTES}"
        return f"{self.model.gdn_layers} * ({h} + {conv})"

    @property
    def h_width(self) -> int:
        return FLOAT16_BYTES if self.config.h_f16_pool else FLOAT32_BYTES

    @property
    def kv_layers(self) -> int:
        return self.model.attention_layers + (1 if self.drafts else 0)

    @property
    def kv_block(self) -> str:
        m = self.model
        width = t.kv_element_bytes(self.config)
        return f"{self.kv_layers} * 2 * {m.num_key_value_heads} * {m.head_dim} * {GRID} * {width}"


_Pair = tuple[str, str]
_STATE = "GDN layers x (Hv x Dk x Dv of h x its bytes + channels x kernel of conv x 4 bytes)"
_PAGE = "attention layers, the drafter's too, x 2 (k and v) x KV heads x head_dim x 64 tokens x "
_PAGE += "bytes of a number"


def explain(
    reserve: ReserveCase,
    config: EngineConfig,
    ledger: MemoryLedger,
    kv_blocks: int,
    name: str,
    parts: tuple[ResidentPart, ...] = (),
) -> Explanation:
    """The term called `name` of a plan.

    Args:
        reserve, config, kv_blocks: what `ledger` was computed from.
        parts: of the weights, where they are known.

    Raises:
        ConfigError: there is no such term; lists those that there are.
    """
    found = {term.name: term for term in ledger.terms}
    if name not in found:
        raise ConfigError(f"--explain {name}: no such term; there are {', '.join(found)}")
    term = found[name]
    formula = _FORMULAS.get(name)
    numbers = _Numbers(reserve.model, config, reserve.policy, kv_blocks, parts)
    words, arithmetic = (term.why, str(term.bytes)) if formula is None else formula(numbers, term)
    return Explanation(term, words, arithmetic)


def _weights(n: _Numbers, term: LedgerTerm) -> _Pair:
    if not n.parts:
        return "given by --weights-bytes", str(term.bytes)
    words = " + ".join(f"{p.what} x {p.width} bytes" for p in n.parts)
    return words, " + ".join(f"{p.elements} * {p.width}" for p in n.parts)


def _state_pool(n: _Numbers, term: LedgerTerm) -> _Pair:
    return f"sequences x {_STATE}", f"{n.batch} * {n.blob}"


def _state_dummy(n: _Numbers, term: LedgerTerm) -> _Pair:
    return f"one slot for padded rows: {_STATE}", n.blob


def _carry(n: _Numbers, slots: int) -> str:
    if not (n.drafts and n.policy.rollback is SsmRollbackMode.CARRY):
        return "0"
    m = n.model
    row = f"({m.conv_dim} + 2 * {m.linear_num_value_heads}) * {FLOAT32_BYTES}"
    return f"{slots} * {n.drafts} * {m.gdn_layers} * {row}"


def _stage(n: _Numbers, term: LedgerTerm) -> _Pair:
    return "sequences x Hv x Dk x Dv x 4 bytes", f"{n.batch} * {n.h} * {FLOAT32_BYTES}"


def _stage_dummy(n: _Numbers, term: LedgerTerm) -> _Pair:
    return "one slot for padded rows: Hv x Dk x Dv x 4 bytes", f"{n.h} * {FLOAT32_BYTES}"


def _carry_ring(n: _Numbers, term: LedgerTerm) -> _Pair:
    words = "slots that may speculate x drafts x GDN layers x (channels + 2 gates x Hv) x 4 bytes"
    return words, _carry(n, n.covered)


def _carry_dummy(n: _Numbers, term: LedgerTerm) -> _Pair:
    words = "one slot for padded rows: drafts x GDN layers x (channels + 2 gates x Hv) x 4 bytes"
    return words, _carry(n, 1)


def _rotary(n: _Numbers, term: LedgerTerm) -> _Pair:
    pairs = len(range(0, n.model.rotary_dim, 2))
    words = "2 tables (cos and sin) x positions x rotary pairs x 4 bytes"
    return words, f"2 * {n.config.max_seq_len} * {pairs} * {FLOAT32_BYTES}"


def _rows(n: _Numbers) -> str:
    return f"({n.batch} + {min(n.batch * n.drafts, t.VERIFY_ROWS)})"


def _logits(n: _Numbers, term: LedgerTerm) -> _Pair:
    words = (
        "copies alive at once x (sequences + drafts that one forward verifies) x vocabulary "
        "x 4 bytes"
    )
    numbers = f"{t.LOGIT_COPIES} * {_rows(n)} * {n.model.vocab_size} * {FLOAT32_BYTES}"
    return words, numbers


def _activations(n: _Numbers, term: LedgerTerm) -> _Pair:
    words = (
        "(prompt tokens of a step + sequences + drafts) x numbers of the widest layer's row "
        "x 4 bytes + block tables: sequences x blocks each x 8 bytes"
    )
    rows = f"({n.config.max_prefill_tokens} + {_rows(n)})"
    tables = f"{n.batch} * {t.blocks_per_sequence(n.config)} * 8"
    numbers = f"{rows} * {t.widest_row(n.model)} * {FLOAT32_BYTES} + {tables}"
    count = n.config.max_prefill_tokens + n.batch + min(n.batch * n.drafts, t.VERIFY_ROWS)
    pieces = product_scratch_bytes(count, t.widest_input(n.model), n.config)
    if pieces:
        words += " + rows in whole tiles x the widest input x 4 bytes, for two pieces of bfloat16"
        whole = -(-count // 16) * 16
        numbers += f" + {whole} * {pieces // (4 * whole)} * 4"
    return words, numbers


def _scratch(n: _Numbers, term: LedgerTerm) -> _Pair:
    if uses_cpu_kernels(n.config) or n.model.gdn_layers == 0:
        return term.why, "0"
    m = n.model
    words = (
        "prompt tokens of a step x (Hv x (squares of a chunk x 64 + rows over Dk + rows over Dv) "
        "+ 3 x channels) x 4 bytes"
    )
    head = (
        f"({t.CHUNK_SQUARES} * {GRID} + {t.CHUNK_KEY_ROWS} * {m.linear_key_head_dim}"
        f" + {t.CHUNK_VALUE_ROWS} * {m.linear_value_head_dim})"
    )
    row = f"({m.linear_num_value_heads} * {head} + 3 * {m.conv_dim})"
    return words, f"{n.config.max_prefill_tokens} * {row} * {FLOAT32_BYTES}"


def _graph_rows(n: _Numbers) -> int:
    return n.batch + min(n.batch * n.drafts, t.VERIFY_ROWS)


def _graph_static(n: _Numbers, term: LedgerTerm) -> _Pair:
    m, rows = n.model, _graph_rows(n)
    words = (
        "index arrays (by row and by entry, ends, block tables), each of an even number of numbers "
        "x 8 bytes + rows x width x bytes of a number + rows x vocabulary x 4 bytes"
    )
    even, ends, width = rows + rows % 2, rows + 1, t.blocks_per_sequence(n.config)
    tables = f"{rows} * {width} + {rows * width % 2}"
    arrays = f"{g.ROW_ARRAYS + g.ENTRY_ARRAYS} * {even}"
    index = f"({arrays} + {ends + ends % 2} + {tables})"
    hidden = f"{rows} * {m.hidden_size} * {element_bytes(n.config.dtype)}"
    return words, f"{index} * {g.INT64_BYTES} + {hidden} + {rows} * {m.vocab_size} * 4"


def _graph_pool(n: _Numbers, term: LedgerTerm) -> _Pair:
    m, rows = n.model, _graph_rows(n)
    count = len(g.graph_buckets(n.batch, n.drafts, rows))
    words = (
        "rows x (numbers of the widest layer's row x 4 bytes + vocabulary x bytes of a number) "
        "+ graphs x what the driver keeps of each"
    )
    row = f"({t.widest_row(m)} * 4 + {m.vocab_size} * {element_bytes(n.config.dtype)})"
    return words, f"{rows} * {row} + {count} * {g.GRAPH_BYTES}"


def _headroom(n: _Numbers, term: LedgerTerm) -> _Pair:
    if n.config.device == "cuda":
        return f"a constant: {term.why}", str(t.CUDA_HEADROOM)
    words = "a constant for fragmentation + vocabulary x width x 4 bytes, the largest matrix packed"
    m = n.model
    return words, f"{t.CPU_HEADROOM} + {m.vocab_size} * {m.hidden_size} * {FLOAT32_BYTES}"


def _constant(n: _Numbers, term: LedgerTerm) -> _Pair:
    return f"a measured constant: {term.why}", str(term.bytes)


def _log(n: _Numbers, term: LedgerTerm) -> _Pair:
    words = "(sequences + one slot for padding) x hidden states each x width x bytes of a number"
    width = element_bytes(n.config.dtype)
    return words, f"{n.batch + 1} * {LOG_ROWS} * {n.model.hidden_size} * {width}"


def _depths(n: _Numbers, slots: range) -> int:
    p = n.policy
    return sum(
        mtp_slot_draft_capacity(
            slot, p.dispatch_cap, p.num_drafts, p.rollback, p.ladder, full_width=p.full_width
        )
        for slot in slots
    )


def _verify(n: _Numbers, slots: range) -> _Pair:
    count, layers = len(slots), n.model.gdn_layers
    checkpoint = f"{count} * {n.blob}"
    if n.policy.rollback is SsmRollbackMode.REPLAY:
        return f"slots that may speculate x {_STATE}", checkpoint
    words = (
        f"slots that may speculate x {_STATE} (checkpoints) + h states after verified rows, by the "
        "ladder's depth of each slot + slots x (drafts + 1) conv states"
    )
    h = f"{_depths(n, slots)} * {layers} * {n.h} * {n.h_width}"
    conv = f"{count} * {n.drafts + 1} * {layers} * {n.conv} * {FLOAT32_BYTES}"
    return words, f"{checkpoint} + {h} + {conv}"


def _verify_pool(n: _Numbers, term: LedgerTerm) -> _Pair:
    return _verify(n, range(n.covered))


def _verify_dummy(n: _Numbers, term: LedgerTerm) -> _Pair:
    words, numbers = _verify(n, range(1))
    return f"one slot for padding, as deep as the deepest: {words}", numbers


def _replay(n: _Numbers, slots: int) -> _Pair:
    blob = ssm_blob(n.model)
    words = "slots that may speculate x drafts x GDN layers x (q, k, v and z + 2 gates x Hv) x 4"
    row = f"({blob.qkvz_elems} + 2 * {blob.value_heads}) * {FLOAT32_BYTES}"
    return f"{words} bytes", f"{slots} * {n.drafts} * {blob.layers} * {row}"


def _replay_ring(n: _Numbers, term: LedgerTerm) -> _Pair:
    return _replay(n, n.covered)


def _replay_dummy(n: _Numbers, term: LedgerTerm) -> _Pair:
    words, numbers = _replay(n, 1)
    return f"one slot for padding: {words}", numbers


def _snapshots(n: _Numbers, term: LedgerTerm) -> _Pair:
    return f"snapshots x {_STATE}", f"{n.config.snapshot_slots} * {n.blob}"


def _snapshot_hidden(n: _Numbers, term: LedgerTerm) -> _Pair:
    slots, size = n.config.snapshot_slots, element_bytes(n.config.dtype)
    return "snapshots x H x bytes a number", f"{slots} * {n.model.hidden_size} * {size}"


def _decode_ring(n: _Numbers, term: LedgerTerm) -> _Pair:
    slots = n.config.decode_ring_slots
    return f"depth x max-batch-size x {_STATE}", f"{slots} * {n.config.max_batch_size} * {n.blob}"


def _kv_pool(n: _Numbers, term: LedgerTerm) -> _Pair:
    return f"blocks x {_PAGE}", f"{n.blocks} * {n.kv_block}"


def _kv_dummy(n: _Numbers, term: LedgerTerm) -> _Pair:
    return f"one block for padding: {_PAGE}", n.kv_block


_FORMULAS: dict[str, Callable[[_Numbers, LedgerTerm], _Pair]] = {
    t.WEIGHTS: _weights,
    t.STATE_POOL: _state_pool,
    t.STATE_DUMMY: _state_dummy,
    t.STATE_STAGE: _stage,
    t.STATE_STAGE_DUMMY: _stage_dummy,
    t.CARRY_RING: _carry_ring,
    t.CARRY_RING_DUMMY: _carry_dummy,
    t.ROTARY: _rotary,
    t.LOGITS: _logits,
    t.ACTIVATIONS: _activations,
    t.GDN_SCRATCH: _scratch,
    g.GRAPH_STATIC: _graph_static,
    g.GRAPH_POOL: _graph_pool,
    t.HEADROOM: _headroom,
    t.BASELINE: _constant,
    t.GRAMMAR: _constant,
    v.DRAFTER_LOG: _log,
    v.VERIFY_POOL: _verify_pool,
    v.VERIFY_DUMMY: _verify_dummy,
    v.REPLAY_RING: _replay_ring,
    v.REPLAY_RING_DUMMY: _replay_dummy,
    v.SNAPSHOTS: _snapshots,
    v.SNAPSHOT_HIDDEN: _snapshot_hidden,
    v.DECODE_RING: _decode_ring,
    t.KV_POOL: _kv_pool,
    t.KV_DUMMY: _kv_dummy,
}
