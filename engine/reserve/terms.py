"""The ledger's terms one by one, from shapes alone. Does not know the budget."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import GRID, EngineConfig
from engine.errors import InvariantError
from engine.pools.shapes import FLOAT32_BYTES, kv_pool_shapes, state_pool_shapes
from engine.reserve.graphs import graph_terms
from engine.reserve.ledger import LedgerTerm, TermKind
from engine.reserve.parameters import (
    element_bytes,
    product_scratch_bytes,
    uses_cpu_kernels,
)
from engine.reserve.ssm_reserve import ssm_blob, ssm_h_prefill_stage_bytes
from engine.weights.model_config import LayerKind, ModelConfig

WEIGHTS = "weights"
STATE_POOL = "state_pool"
STATE_DUMMY = "state_dummy"
STATE_STAGE = "state_stage"
STATE_STAGE_DUMMY = "state_stage_dummy"
CARRY_RING = "carry_ring"
CARRY_RING_DUMMY = "carry_ring_dummy"
ROTARY = "rotary_tables"
KV_POOL = "kv_pool"
KV_DUMMY = "kv_dummy"
LOGITS = "logits"
ACTIVATIONS = "activations"
GDN_SCRATCH = "gdn_scratch"
HEADROOM = "allocator_headroom"
BASELINE = "process_baseline"
GRAMMAR = "grammar"

# Resident memory of a process that imported torch and numba and compiled the kernels: 275 MiB after
# the imports, the rest is compiled code and thread stacks (x86-64, torch 2.x).
PROCESS_BASELINE = 350 * 2**20
# The CUDA context lives on the device, as do cuBLAS workspaces and what fragmentation leaves.
CUDA_CONTEXT = 600 * 2**20
# xgrammar in the engine, the process beside it that compiles (173 MiB of its own), 64 MiB of cache.
GRAMMAR_BYTES = 320 * 2**20
# malloc keeps freed buffers of this order; the caching allocator rounds to 2 and 20 MiB.
CPU_HEADROOM = 64 * 2**20
CUDA_HEADROOM = 512 * 2**20
# Float32 copies of the logits that live at once: the head's output, scaled, sorted or summed.
LOGIT_COPIES = 3
# A verify forward carries no more unverified rows than this; wider steps run several.
VERIFY_ROWS = 96
# Per token and value head: scores, decay, A, A + I, its inverse and the masked product, GRID each.
CHUNK_SQUARES = 6
# q, k, k beta, k decayed, q decayed, W over Dk; v, U, V' and the output over Dv.
CHUNK_KEY_ROWS = 6
CHUNK_VALUE_ROWS = 4


@dataclass(frozen=True, slots=True)
class Speculation:
    """What speculation adds: `with_mtp` loads the drafter and gives it one KV layer.

    Attributes:
        drafts: unverified rows of a step and sequence at most, 0 without speculation.
        ring_slots: slots of the carry ring with its dummy, 0 for no ring.
    """

    with_mtp: bool = False
    drafts: int = 0
    ring_slots: int = 0


def kv_element_bytes(config: EngineConfig) -> int:
    """Bytes of one number in the KV pages: they have the type of the activations."""
    return element_bytes(config.dtype)


def kv_block_bytes(model: ModelConfig, config: EngineConfig, *, with_mtp: bool) -> int:
    """Bytes of one block of GRID tokens over all attention layers; the dummy block has as many."""
    return kv_pool_shapes(model, 0, with_mtp=with_mtp).nbytes(kv_element_bytes(config))


def blocks_per_sequence(config: EngineConfig) -> int:
    """KV blocks of one sequence of the full length."""
    return -(-config.max_seq_len // GRID)


def kv_terms(
    model: ModelConfig, config: EngineConfig, blocks: int, *, with_mtp: bool
) -> tuple[LedgerTerm, ...]:
    """Pool and dummy of `blocks` KV blocks."""
    whole = kv_pool_shapes(model, blocks, with_mtp=with_mtp).nbytes(kv_element_bytes(config))
    block = kv_block_bytes(model, config, with_mtp=with_mtp)
    return (
        LedgerTerm(
            KV_POOL,
            whole - block,
            TermKind.EXACT,
            f"{blocks} blocks of {GRID} tokens in {config.dtype}, {blocks * GRID} tokens",
        ),
        LedgerTerm(KV_DUMMY, block, TermKind.EXACT, "one block for padding"),
    )


def fixed_terms(
    model: ModelConfig, config: EngineConfig, weights_bytes: int, speculation: Speculation
) -> tuple[LedgerTerm, ...]:
    """Every term but those of the KV pool; none falls when the batch or the length grows."""
    return (
        LedgerTerm(WEIGHTS, weights_bytes, TermKind.ESTIMATE, "packed matrices and embeddings"),
        *_state_terms(model, config, speculation),
        LedgerTerm(
            ROTARY,
            2 * config.max_seq_len * len(range(0, model.rotary_dim, 2)) * FLOAT32_BYTES,
            TermKind.EXACT,
            f"cos and sin of {config.max_seq_len} positions",
        ),
        _logits(model, config, speculation),
        _activations(model, config, speculation),
        _gdn_scratch(model, config),
        *graph_terms(
            model,
            config,
            speculation.drafts,
            decode_rows(config, speculation),
            widest_row(model),
        ),
        _headroom(model, config),
        LedgerTerm(
            BASELINE,
            CUDA_CONTEXT if config.device == "cuda" else PROCESS_BASELINE,
            TermKind.ESTIMATE,
            "CUDA context" if config.device == "cuda" else "torch, numba and compiled kernels",
        ),
        LedgerTerm(
            GRAMMAR,
            0 if config.device == "cuda" else GRAMMAR_BYTES,
            TermKind.ESTIMATE,
            "xgrammar, the process that compiles grammars, and their cache",
        ),
    )


def allocated_terms(
    config: EngineConfig,
    *,
    state_bytes: int,
    stage_bytes: int = 0,
    ring_bytes: int,
    ring_slots: int,
    kv_bytes: int,
    kv_blocks: int,
    rotary_bytes: int,
) -> dict[str, int]:
    """What the pools really hold, by term, for `MemoryLedger.check_allocated`.

    Args:
        config: the one that the pools were made with.
        state_bytes: of h and conv, dummy slot included.
        stage_bytes: of the float32 stage of an f16 pool, dummy slot included.
        ring_bytes: of the carry ring, its dummy included.
        ring_slots: of the carry ring with its dummy.
        kv_bytes: of k and v, dummy block included.
        kv_blocks: without the dummy.
        rotary_bytes: of cos and sin.
    """
    pool, dummy = _split(state_bytes, config.max_batch_size + 1, "state pool")
    ring, ring_dummy = _split(ring_bytes, ring_slots, "carry ring")
    pages, page = _split(kv_bytes, kv_blocks + 1, "KV pool")
    stage, stage_dummy = _split(stage_bytes, config.max_batch_size + 1, "stage")
    staged = {STATE_STAGE: stage, STATE_STAGE_DUMMY: stage_dummy} if stage_bytes else {}
    return {
        **staged,
        STATE_POOL: pool,
        STATE_DUMMY: dummy,
        CARRY_RING: ring,
        CARRY_RING_DUMMY: ring_dummy,
        ROTARY: rotary_bytes,
        KV_POOL: pages,
        KV_DUMMY: page,
    }


def _split(total: int, parts: int, what: str) -> tuple[int, int]:
    """(all but one part, one part) of `total` bytes in `parts` equal parts."""
    one, rest = divmod(total, parts) if parts else (0, total)
    if rest:
        raise InvariantError(f"the {what} of {total} bytes does not divide into {parts} parts")
    return total - one, one


def _state_terms(
    model: ModelConfig, config: EngineConfig, speculation: Speculation
) -> tuple[LedgerTerm, ...]:
    shapes = state_pool_shapes(
        model,
        config.max_batch_size,
        ring_slots=speculation.ring_slots,
        drafts=speculation.drafts,
        h_f16=config.h_f16_pool,
    )
    pool, blob = _split(shapes.state_bytes, config.max_batch_size + 1, STATE_POOL)
    ring, ring_dummy = _split(shapes.ring_bytes, speculation.ring_slots, CARRY_RING)
    covered = max(speculation.ring_slots - 1, 0)
    return (
        LedgerTerm(
            STATE_POOL,
            pool,
            TermKind.EXACT,
            f"{config.max_batch_size} sequences of {blob} bytes in {model.gdn_layers} layers",
        ),
        LedgerTerm(STATE_DUMMY, blob, TermKind.EXACT, "one slot for padding"),
        *_stage_terms(model, config),
        LedgerTerm(
            CARRY_RING,
            ring,
            TermKind.EXACT,
            f"{speculation.drafts} unverified rows of {covered} slots",
        ),
        LedgerTerm(CARRY_RING_DUMMY, ring_dummy, TermKind.EXACT, "one slot for padding"),
    )


def _stage_terms(model: ModelConfig, config: EngineConfig) -> tuple[LedgerTerm, ...]:
    """Where rows run in float32 over a pool in float16; none over one in float32."""
    blob = ssm_blob(model)
    stage = ssm_h_prefill_stage_bytes(blob, config.max_batch_size, config.h_f16_pool)
    if stage == 0:
        return ()
    why = f"h of one layer of {config.max_batch_size} sequences in float32 (--ssm-h-dtype f16-pool)"
    dummy = ssm_h_prefill_stage_bytes(blob, 1, config.h_f16_pool)
    return (
        LedgerTerm(STATE_STAGE, stage, TermKind.EXACT, why),
        LedgerTerm(STATE_STAGE_DUMMY, dummy, TermKind.EXACT, "one slot for padding"),
    )


def decode_rows(config: EngineConfig, speculation: Speculation) -> int:
    """Rows of one forward of decodes: one of every sequence, and the drafts that it may verify."""
    drafts = min(config.max_batch_size * speculation.drafts, VERIFY_ROWS)
    return config.max_batch_size + drafts


def _logits(model: ModelConfig, config: EngineConfig, speculation: Speculation) -> LedgerTerm:
    rows = decode_rows(config, speculation)
    return LedgerTerm(
        LOGITS,
        LOGIT_COPIES * rows * model.vocab_size * FLOAT32_BYTES,
        TermKind.ESTIMATE,
        f"{rows} rows of {model.vocab_size} in float32, {LOGIT_COPIES} at once",
    )


def _activations(model: ModelConfig, config: EngineConfig, speculation: Speculation) -> LedgerTerm:
    rows = config.max_prefill_tokens + decode_rows(config, speculation)
    width = widest_row(model)
    tables = config.max_batch_size * blocks_per_sequence(config) * 8
    pieces = product_scratch_bytes(rows, widest_input(model), config)
    return LedgerTerm(
        ACTIVATIONS,
        rows * width * FLOAT32_BYTES + pieces + tables,
        TermKind.ESTIMATE,
        f"{rows} rows of {width} numbers in float32, "
        f"{'their pieces in bfloat16, ' if pieces else ''}and block tables",
    )


def widest_input(model: ModelConfig) -> int:
    """Numbers of a row that some matrix of a layer multiplies; the drafter's first takes two."""
    mixers = {
        LayerKind.LINEAR: model.value_dim,
        LayerKind.FULL: model.num_attention_heads * model.head_dim,
    }
    mlp = model.intermediate_size
    if model.num_experts:
        mlp = max(model.moe_intermediate_size, model.shared_expert_intermediate_size)
    both = 2 * model.hidden_size
    return max([both, mlp, *(mixers[kind] for kind in set(model.layer_kinds))])


def widest_row(model: ModelConfig) -> int:
    """Numbers per row alive in the widest layer: three of the model's width and the layer's own."""
    gdn = model.conv_dim + 2 * model.value_dim + 2 * model.linear_num_value_heads
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    attention = (3 * heads + 2 * kv_heads) * model.head_dim
    # Gate and up, their product, and the result.
    mlp = 3 * model.intermediate_size + model.hidden_size
    if model.num_experts:
        routed = 3 * model.moe_intermediate_size + model.hidden_size
        shared = 3 * model.shared_expert_intermediate_size + model.hidden_size
        mlp = 2 * model.num_experts + model.num_experts_per_tok * routed + shared
    mixers = {LayerKind.LINEAR: gdn, LayerKind.FULL: attention}
    widest = max([mlp, *(mixers[kind] for kind in set(model.layer_kinds))])
    return 3 * model.hidden_size + widest


def _gdn_scratch(model: ModelConfig, config: EngineConfig) -> LedgerTerm:
    if uses_cpu_kernels(config) or model.gdn_layers == 0:
        return LedgerTerm(
            GDN_SCRATCH, 0, TermKind.ESTIMATE, "the CPU kernels keep a row in registers"
        )
    heads, tokens = model.linear_num_value_heads, config.max_prefill_tokens
    per_head = (
        CHUNK_SQUARES * GRID
        + CHUNK_KEY_ROWS * model.linear_key_head_dim
        + CHUNK_VALUE_ROWS * model.linear_value_head_dim
    )
    return LedgerTerm(
        GDN_SCRATCH,
        tokens * (heads * per_head + 3 * model.conv_dim) * FLOAT32_BYTES,
        TermKind.ESTIMATE,
        f"chunk form of {tokens} prompt tokens in {heads} heads",
    )


def _headroom(model: ModelConfig, config: EngineConfig) -> LedgerTerm:
    if config.device == "cuda":
        return LedgerTerm(
            HEADROOM, CUDA_HEADROOM, TermKind.ESTIMATE, "cuBLAS workspaces and fragmentation"
        )
    # Packing widens one matrix to float32 beside its source; the largest is the head's.
    widened = model.vocab_size * model.hidden_size * FLOAT32_BYTES
    return LedgerTerm(
        HEADROOM,
        CPU_HEADROOM + widened,
        TermKind.ESTIMATE,
        "fragmentation, and the largest matrix in float32 while it is packed",
    )
