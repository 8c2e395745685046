"""Stage `mixers`: one layer's GDN step and paged attention of the 27B, held to their goals.

Through the same operators, pools and index tensors as the engine's own steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.engines import model_of
from benchmarks.gpu.geometries import LARGE
from benchmarks.gpu.options import Options
from benchmarks.gpu.rows import Row, Status, error_row, goal
from benchmarks.gpu.runner import Emit
from benchmarks.gpu.timing import median_seconds
from benchmarks.gpu.weights import RandomWeights
from benchmarks.traffic import StepShape, state_bytes
from engine.build import DTYPES, choose_ops
from engine.config import GRID, EngineConfig
from engine.model.batching import step_input
from engine.model.layers import attention_mixer, gdn_mixer, rotary_tables
from engine.pools.allocate import pool_shapes
from engine.pools.kv import KvPool
from engine.pools.rollback import RowLayout, rollback_of
from engine.pools.shapes import kv_pool_shapes
from engine.pools.snapshots import StateSnapshots
from engine.pools.state import SsmStatePool
from engine.reserve.ssm_reserve import SpeculationPolicy, SsmRollbackMode
from engine.runner import RowPhase, Segment
from engine.weights.layout import AttentionWeights, GdnWeights
from engine.weights.model_config import LayerKind, ModelConfig
from kernels.ops import Ops

STAGE = "mixers"
WIDTHS = (1, 16, 32, 128)
DRAFTS = 3
CONTEXT = 4096
GOAL_WIDTH = 16
GOAL_SHARE = 0.75
GOAL_VERIFY = 1.10


@dataclass(frozen=True, slots=True)
class Bench:
    """What every measurement needs: the shapes, the operators, and where and how they run."""

    model: ModelConfig
    ops: Ops
    device: torch.device
    dtype: torch.dtype


def run(options: Options, emit: Emit) -> None:
    """Emit GDN and attention rows by width, and the price of a carry verify."""
    config = EngineConfig(
        model_dir="",
        device=options.device,
        dtype="float32" if options.device == "cpu" else "bfloat16",
        kernels="triton",
    )
    model = model_of("miniature-3" if options.smoke else LARGE)
    bench = Bench(model, choose_ops(config), torch.device(options.device), DTYPES[config.dtype])
    emit(Row(STAGE, "operators", Status.INFO, bench.ops.name, brief=False))
    widths = (2,) if options.smoke else WIDTHS
    context = GRID if options.smoke else CONTEXT
    for width in widths:
        for measure in (_gdn_rows, _attention_rows):
            try:
                for row in measure(bench, width, context, options):
                    emit(row)
            except Exception as error:
                emit(error_row(STAGE, f"{measure.__name__.split('_')[1]} {width}", error))


@torch.inference_mode()
def _gdn_rows(bench: Bench, width: int, context: int, options: Options) -> list[Row]:
    """A plain step, and verifies after which none and all drafts of the last one are pending."""
    plain_step = gdn_step(bench, width, rows=1, pending=0)
    plain = median_seconds(plain_step, bench.device, smoke=options.smoke)
    found = [_speed("GDN step", width, gdn_bytes(bench, width, 1, 0), plain, options)]
    for pending in (0, DRAFTS):
        step = gdn_step(bench, width, rows=1 + DRAFTS, pending=pending)
        seconds = median_seconds(step, bench.device, smoke=options.smoke)
        cost = seconds / plain
        judged = width >= GOAL_WIDTH
        found.append(
            Row(
                STAGE,
                f"GDN carry K={1 + DRAFTS}, {pending} pending, width {width}",
                goal(cost <= GOAL_VERIFY, smoke=options.smoke) if judged else Status.INFO,
                f"{seconds * 1e6:.1f} us, {cost:.2f} x plain"
                + (f" (goal {GOAL_VERIFY:.2f})" if judged else ""),
                {"seconds": seconds, "cost": cost, "width": width, "pending": pending},
                brief=judged,
            )
        )
    return found


@torch.inference_mode()
def _attention_rows(bench: Bench, width: int, context: int, options: Options) -> list[Row]:
    """One row and K rows per sequence on `context` cached tokens."""
    found = []
    for rows in (1, 1 + DRAFTS):
        step = attention_step(bench, width, rows, context)
        seconds = median_seconds(step, bench.device, smoke=options.smoke)
        moved = attention_bytes(bench, width, rows, context)
        name = "attention step" if rows == 1 else f"attention K={rows}"
        found.append(_speed(f"{name}, {context} tokens", width, moved, seconds, options))
    return found


def _speed(what: str, width: int, moved: int, seconds: float, options: Options) -> Row:
    numbers = {"seconds": seconds, "bytes": moved, "width": width}
    text = f"{seconds * 1e6:.1f} us, {moved / seconds / 1e9:,.0f} GB/s"
    status = Status.INFO
    if options.machine is not None:
        share = moved / seconds / options.machine.bandwidth
        numbers["bandwidth_share"] = share
        text += f", {share:.0%} of a copy"
        if width >= GOAL_WIDTH:
            status = goal(share >= GOAL_SHARE, smoke=options.smoke)
            text += f" (goal {GOAL_SHARE:.0%})"
    return Row(STAGE, f"{what}, width {width}", status, text, numbers, brief=width >= GOAL_WIDTH)


def gdn_step(bench: Bench, width: int, rows: int, pending: int) -> Callable[[], Tensor]:
    """One layer's GDN mixer over `width` sequences of `rows` rows in carry mode.

    It can be called again and again: pending rows stay pending, and the state decays.
    """
    model = replace(bench.model, layer_kinds=(LayerKind.LINEAR,))
    policy = SpeculationPolicy(DRAFTS, dispatch_cap=width, ladder=None, full_width=True)
    states = SsmStatePool(*pool_shapes(model, width, policy), bench.device)
    states.h.normal_(0.0, 0.1)
    states.conv.normal_()
    states.ring_inputs.normal_()
    states.ring_gates.uniform_(0.0, 1.0)
    states.ring_gates[..., 0, :].neg_()
    weights = RandomWeights(model, bench.device, bench.dtype).layer(0).mixer
    assert isinstance(weights, GdnWeights)
    mixer = gdn_mixer(weights, model, states.layer(0), bench.ops)
    rollback = rollback_of(SsmRollbackMode.CARRY, states, StateSnapshots(states, 0))
    layouts = [rollback.layout(s, rows) if rows > 1 else RowLayout(1) for s in range(width)]
    states.pending[:width] = pending
    segments = [_segment(slot, GRID, rows, ()) for slot in range(width)]
    batch = step_input(segments, layouts, states.pending, 0, bench.device).batch
    columns = model.conv_dim + model.value_dim + 2 * model.linear_num_value_heads
    proj = torch.randn(width * rows, columns, dtype=bench.dtype, device=bench.device)
    return lambda: bench.ops.gdn_mixer(proj, mixer.params, mixer.state, batch)


def gdn_bytes(bench: Bench, width: int, rows: int, pending: int) -> int:
    """State, projected rows in and mixed rows out, of one layer."""
    model = replace(bench.model, layer_kinds=(LayerKind.LINEAR,))
    shape = StepShape(1, rows, emitted=1 + pending)
    columns = model.conv_dim + 2 * model.value_dim + 2 * model.linear_num_value_heads
    return width * (state_bytes(model, shape) + rows * columns * bench.dtype.itemsize)


def attention_step(bench: Bench, width: int, rows: int, context: int) -> Callable[[], Tensor]:
    """One layer's attention mixer over sequences whose pages lie scattered."""
    model = replace(bench.model, layer_kinds=(LayerKind.FULL,))
    blocks = -(-context // GRID)
    pool = KvPool(kv_pool_shapes(model, width * blocks, with_mtp=False), bench.dtype, bench.device)
    pool.k.normal_()
    pool.v.normal_()
    weights = RandomWeights(model, bench.device, bench.dtype).layer(0).mixer
    assert isinstance(weights, AttentionWeights)
    rotary = rotary_tables(model, context)
    tables = (rotary[0].to(bench.device), rotary[1].to(bench.device))
    mixer = attention_mixer(weights, model, tables, pool.layer(0), bench.ops)
    order = np.random.default_rng(0).permutation(width * blocks).reshape(width, blocks).tolist()
    segments = [_segment(s, context - rows, rows, tuple(order[s])) for s in range(width)]
    layouts = [RowLayout(rows)] * width
    pending = np.zeros(width, np.int64)
    batch = step_input(segments, layouts, pending, pool.dummy_block, bench.device).batch
    heads = 2 * model.num_attention_heads + 2 * model.num_key_value_heads
    qkv = torch.randn(width * rows, heads * model.head_dim, dtype=bench.dtype, device=bench.device)
    return lambda: bench.ops.attention_mixer(qkv, mixer.params, mixer.pages, batch, None)


def attention_bytes(bench: Bench, width: int, rows: int, context: int) -> int:
    """Cached keys and values once for all rows of a sequence, projected rows in, mixed ones out."""
    model = bench.model
    heads = 3 * model.num_attention_heads + 4 * model.num_key_value_heads
    cached = 2 * (context - rows) * model.num_key_value_heads
    return width * (cached + rows * heads) * model.head_dim * bench.dtype.itemsize


def _segment(slot: int, start: int, rows: int, table: tuple[int, ...]) -> Segment:
    return Segment(slot, start, (0,) * rows, RowPhase.DECODE, 1, table, rows)
