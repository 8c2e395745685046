"""What one decode or verify step must move and compute, by operator, from shapes alone.

Knows no device: a floor takes bandwidth and rate as numbers. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from engine.reserve.ssm_reserve import (
    SsmRollbackMode,
    ssm_blob,
    ssm_carry_row_bytes,
    ssm_replay_row_bytes,
)
from engine.weights.model_config import LayerKind, ModelConfig

FLOAT32 = 4
# Per number of h and row: decay, then two operations each for S^T k, k u^T and S^T q.
DELTA_RULE_FLOPS = 7
ACTIVATIONS = "activations"


@dataclass(frozen=True, slots=True)
class StepShape:
    """The rows of one step; every sequence has as many.

    Attributes:
        sequences: that decode.
        rows: of each, drafts + 1 in a verify and 1 in a plain step.
        context: tokens in each sequence's KV after the step.
        mode: what becomes of rejected rows; does not matter with one row.
        emitted: tokens that each verify yields, 1 to `rows`; the same in the step before.
        element: bytes of a weight, an activation, and a number in the KV pages.
    """

    sequences: int
    rows: int = 1
    context: int = 1024
    mode: SsmRollbackMode = SsmRollbackMode.CARRY
    emitted: int = 1
    element: int = 2

    @property
    def total_rows(self) -> int:
        """Rows of all sequences."""
        return self.sequences * self.rows


@dataclass(frozen=True, slots=True)
class Work:
    """One operator over all its layers; bytes that stay in a cache are not `forced`."""

    operator: str
    bytes: int
    flops: int
    forced: bool = True


def step_work(model: ModelConfig, shape: StepShape) -> tuple[Work, ...]:
    """The target's forward over a step's rows, and the state traffic of its commit."""
    rows, gdn, full = shape.total_rows, model.gdn_layers, model.attention_layers
    return (
        *_gdn_matrices(model, rows, gdn, shape.element),
        *_attention_matrices(model, rows, full, shape.element),
        *_mlp_matrices(model, rows, gdn + full, shape.element),
        _matrix("head", model.vocab_size, model.hidden_size, rows, 1, shape.element),
        *_states(model, shape),
        _keys_and_values(model, shape, full),
        _small(model, rows, shape.element),
        _activations(model, rows, shape.element),
    )


def draft_work(model: ModelConfig, shape: StepShape) -> tuple[Work, ...]:
    """All passes of the drafter that propose `rows - 1` tokens to every sequence.

    The first pass runs over the `emitted` rows that became final, each further one over one row;
    every pass reads the drafter's layer and the head once.
    """
    drafts = shape.rows - 1
    if drafts < 1 or model.mtp_layers == 0:
        return ()
    rows = shape.sequences * (shape.emitted + drafts - 1)
    width, element = model.hidden_size, shape.element
    matrices = (
        _matrix("fc", width, 2 * width, rows, 1, element),
        *_attention_matrices(model, rows, 1, element),
        *_mlp_matrices(model, rows, 1, element),
    )
    layer = sum(work.bytes for work in matrices) * drafts
    head = model.vocab_size * width
    cached = _keys_and_values(model, StepShape(shape.sequences, 1, shape.context), 1)
    return (
        Work("drafter layer", layer, sum(work.flops for work in matrices)),
        Work("drafter head", head * drafts * element, 2 * head * shape.sequences * drafts),
        Work("drafter KV", cached.bytes * drafts, cached.flops * drafts),
    )


def state_bytes(model: ModelConfig, shape: StepShape) -> int:
    """Recurrent state that one sequence's step reads and writes, its commit included.

    Plain: state in, state out. Carry: the same, with the rows of this verify into the ring and
    those that came true in the last one out of it. Replay and snapshot save the state first; a
    partial accept copies it (replay: back, then runs the right rows again; snapshot: from a row).
    """
    blob = ssm_blob(model)
    both, drafts = 2 * blob.nbytes, shape.rows - 1
    if drafts == 0:
        return both
    partial = shape.emitted < shape.rows
    match shape.mode:
        case SsmRollbackMode.CARRY:
            row = blob.layers * ssm_carry_row_bytes(blob.conv_dim, blob.value_heads, FLOAT32)
            return both + (drafts + shape.emitted - 1) * row
        case SsmRollbackMode.REPLAY:
            row = blob.layers * ssm_replay_row_bytes(blob.qkvz_elems, blob.value_heads, FLOAT32)
            return 2 * both + drafts * row + partial * (2 * both + shape.emitted * row)
        case SsmRollbackMode.SNAPSHOT:
            kept = drafts * blob.h_bytes + shape.rows * blob.conv_bytes
            return 2 * both + kept + partial * both


def forced_bytes(work: Iterable[Work]) -> int:
    """Bytes that must come from or go to memory: weights, states, keys and values."""
    return sum(item.bytes for item in work if item.forced)


def total_flops(work: Iterable[Work]) -> int:
    """Floating-point operations of all operators."""
    return sum(item.flops for item in work)


def floor_seconds(work: Iterable[Work], bandwidth: float, rate: float | None = None) -> float:
    """The least time at `bandwidth` bytes/s and, where given, `rate` FLOP/s, operator by operator.

    The roofline of Williams et al. (2009): each operator takes the longer of its two times.
    """
    seconds = 0.0
    for item in work:
        moved = item.bytes / bandwidth if item.forced else 0.0
        seconds += max(moved, item.flops / rate if rate else 0.0)
    return seconds


def _matrix(operator: str, outputs: int, inputs: int, rows: int, layers: int, element: int) -> Work:
    return Work(operator, layers * outputs * inputs * element, 2 * rows * layers * outputs * inputs)


def _gdn_matrices(model: ModelConfig, rows: int, layers: int, element: int) -> Iterator[Work]:
    columns = model.conv_dim + model.value_dim + 2 * model.linear_num_value_heads
    yield _matrix("GDN in_proj", columns, model.hidden_size, rows, layers, element)
    yield _matrix("GDN out_proj", model.hidden_size, model.value_dim, rows, layers, element)


def _attention_matrices(model: ModelConfig, rows: int, layers: int, element: int) -> Iterator[Work]:
    queries = model.num_attention_heads * model.head_dim
    columns = 2 * queries + 2 * model.num_key_value_heads * model.head_dim
    yield _matrix("attention qkv_proj", columns, model.hidden_size, rows, layers, element)
    yield _matrix("attention o_proj", model.hidden_size, queries, rows, layers, element)


def _mlp_matrices(model: ModelConfig, rows: int, layers: int, element: int) -> Iterator[Work]:
    width = model.hidden_size
    if not model.num_experts:
        inner = model.intermediate_size
        yield _matrix("MLP gate_up", 2 * inner, width, rows, layers, element)
        yield _matrix("MLP down", width, inner, rows, layers, element)
        return
    experts, chosen = model.num_experts, model.num_experts_per_tok
    inner, shared = model.moe_intermediate_size, model.shared_expert_intermediate_size
    # Experts that at least one of `rows` rows takes, when every choice is equally likely.
    touched = round(experts * (1 - (1 - chosen / experts) ** rows))
    one = 3 * inner * width
    yield Work("MoE experts", layers * touched * one * element, 2 * rows * layers * chosen * one)
    yield _matrix("MoE router", experts + 1, width, rows, layers, element)
    yield _matrix("MoE shared expert", 3 * shared, width, rows, layers, element)


def _states(model: ModelConfig, shape: StepShape) -> Iterator[Work]:
    """h and conv apart, where they can be told apart: the rest of a verify counts with h."""
    blob, rows = ssm_blob(model), shape.total_rows
    conv = 2 * blob.conv_bytes
    numbers = blob.h_bytes // FLOAT32
    taps = model.linear_conv_kernel_dim
    yield Work(
        "GDN state",
        shape.sequences * (state_bytes(model, shape) - conv),
        rows * DELTA_RULE_FLOPS * numbers,
    )
    yield Work("conv state", shape.sequences * conv, rows * 2 * taps * blob.layers * blob.conv_dim)


def _keys_and_values(model: ModelConfig, shape: StepShape, layers: int) -> Work:
    """Every sequence's context once for all its rows, and the rows' own keys and values."""
    token = 2 * layers * model.num_key_value_heads * model.head_dim * shape.element
    queries = layers * model.num_attention_heads * model.head_dim
    return Work(
        "attention KV",
        shape.sequences * (shape.context + shape.rows) * token,
        4 * shape.total_rows * shape.context * queries,
    )


def _small(model: ModelConfig, rows: int, element: int) -> Work:
    """Embedding rows, norms, convolution weights and gate constants."""
    layers = len(model.layer_kinds)
    gates = 2 * model.linear_num_value_heads + model.linear_value_head_dim
    gdn = model.conv_dim * model.linear_conv_kernel_dim + gates
    small = (2 * layers + 1) * model.hidden_size + model.gdn_layers * gdn
    small += model.attention_layers * 2 * model.head_dim
    embedded = rows * model.hidden_size * element
    return Work("embedding, norms, gates", small * FLOAT32 + embedded, 0)


def _activations(model: ModelConfig, rows: int, element: int) -> Work:
    """What operators hand to each other, written and read once; fits a cache in narrow steps."""
    per_row = sum(_handed_on(model, kind) for kind in model.layer_kinds)
    per_row += 5 * model.hidden_size + model.vocab_size  # the last norm, then the head
    return Work(ACTIVATIONS, rows * per_row * element, 0, forced=False)


def _handed_on(model: ModelConfig, kind: LayerKind) -> int:
    """Numbers per row that the operators of one layer read and write."""
    width = model.hidden_size
    # Residual in and out, delta in, normed out; twice.
    norms = 8 * width
    if kind is LayerKind.LINEAR:
        columns = model.conv_dim + model.value_dim + 2 * model.linear_num_value_heads
        mixed = model.value_dim
    else:
        mixed = model.num_attention_heads * model.head_dim
        columns = 2 * mixed + 2 * model.num_key_value_heads * model.head_dim
    mixer = 2 * width + 2 * columns + 2 * mixed
    inner = model.intermediate_size
    if model.num_experts:
        inner = model.num_experts_per_tok * model.moe_intermediate_size
        inner += model.shared_expert_intermediate_size
    # gate_up writes 2 I, silu reads them and writes I, down reads it.
    return norms + mixer + 2 * width + 6 * inner
