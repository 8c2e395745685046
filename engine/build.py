"""From a configuration to a running engine: preflight, pools, weights, warm-up, and the account.

Everything is sized by the preflight before a weight byte is read, and checked against it after.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import torch

from engine.calibration import calibrate
from engine.config import GRID, EngineConfig
from engine.core import EngineCore
from engine.errors import ConfigError, UnsupportedKernelError
from engine.grammar.loading import grammar_masks
from engine.grammar.vocabulary import load_vocabulary
from engine.model.forms import forms_agree
from engine.model.graphs import CudaCapture
from engine.model.hybrid import HybridModel
from engine.model.layers import rotary_bytes
from engine.model.load import build_network, load_network
from engine.pools.allocate import allocate_pools, pool_terms
from engine.pools.snapshots import StateSnapshots
from engine.reserve.graphs import graph_buckets
from engine.reserve.preflight import Preflight
from engine.reserve.start import preflight_with_ring, reserve_policy
from engine.reserve.terms import blocks_per_sequence
from engine.warmup import warm_up
from engine.watchdogs.boundaries import boundary_mask
from engine.watchdogs.watchdogs import Watchdogs
from engine.weights.layout import WeightSource
from engine.weights.loader import Progress as WeightProgress
from engine.weights.model_config import ModelConfig, load_config
from kernels.compiles import CompileCounter
from kernels.errors import UnsupportedKernelError as MissingKernelError
from kernels.ops import Ops, chosen, cpu_ops, naive_ops, triton_ops
from kernels.support import ModelSizes, check_triton

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class PhaseDone(Protocol):
    """Called after every phase of the start."""

    def __call__(self, phase: str, seconds: float, detail: str = "") -> None: ...


@dataclass(frozen=True, slots=True)
class BuiltInfo:
    """What the API must know: vocabulary with padding, end ids, and the chosen operators.

    `grammar` says whether requests may carry one.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    kernels: str
    grammar: bool = False


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """A loaded engine, ready to step.

    `model` is what the core drives. `later` is what may be called, and returns at once, when it has
    begun to serve.
    """

    core: EngineCore
    info: BuiltInfo
    ledger: Preflight
    model: HybridModel
    later: tuple[Callable[[], None], ...] = ()


def build_engine(
    config: EngineConfig,
    progress: PhaseDone,
    weight_progress: WeightProgress | None = None,
    source: Callable[[ModelConfig], WeightSource] | None = None,
    ops: Ops | None = None,
) -> BuiltEngine:
    """Build the engine of `config`, whose device, dtype and memory budget are resolved.

    With `source` the weights come from there, and the folder needs no more than its config.json.
    With `ops` these operators run and not those that the configuration chooses.

    Raises:
        ConfigError, DoesNotFitError: the settings cannot work; nothing was loaded.
        ModelFormatError: the checkpoint cannot be served.
        UnsupportedKernelError: an operator lacks what the model asks of it.
        InvariantError: the pools take other bytes than the preflight reserved.
    """
    try:
        return _build(config, progress, weight_progress, source, ops or choose_ops(config))
    except MissingKernelError as error:
        raise UnsupportedKernelError(f"{error}; or use --kernels naive") from error


def _build(
    config: EngineConfig,
    progress: PhaseDone,
    weight_progress: WeightProgress | None,
    source: Callable[[ModelConfig], WeightSource] | None,
    ops: Ops,
) -> BuiltEngine:
    phase = _Phases(progress)
    folder = Path(config.model_dir)
    model_config = load_config(folder)
    check_supported(ops, model_config, config)
    forms = ", ".join(f"{operator} {form}" for operator, form in chosen(ops).items())
    logger.info("Operators: %s", forms)
    found, ring = preflight_with_ring(config, model_config, from_files=source is None)
    if config.watchdogs and ring.skipped is not None:
        logger.info("Watchdogs stop and do not roll back: %s", ring.skipped)
    phase.done("preflight", f"{found.kv_blocks} KV blocks of {GRID} tokens")

    dtype = DTYPES[config.dtype]
    policy = reserve_policy(config)
    pools = allocate_pools(
        model_config, config, policy, found.kv_blocks, dtype, ops.move_rows, ring_slots=ring.slots
    )
    found.ledger.check_allocated(
        pool_terms(config, policy, pools, rotary_bytes(model_config, config.max_seq_len))
    )
    phase.done("pools", f"state {pools.states.nbytes} bytes, KV {pools.kv.nbytes} bytes")

    with_mtp = policy.num_drafts > 0
    if source is None:
        network = load_network(
            folder,
            model_config,
            pools,
            ops,
            config.max_seq_len,
            with_mtp=with_mtp,
            progress=weight_progress,
        )
    else:
        network = build_network(
            source(model_config), model_config, pools, ops, config.max_seq_len, with_mtp=with_mtp
        )
    phase.done("weights", f"operators {ops.name}, head {getattr(network.lm_head, 'form', '?')}")
    threads = config.threads or torch.get_num_threads()
    # Kernels that are compiled for a shape want one width of block tables.
    width = blocks_per_sequence(config) if ops.name == "triton" else 0
    model = HybridModel(model_config, network, pools, ops, dtype, threads, policy.rollback, width)
    if ops.name == "cpu":
        # Here and not above: numba and what it needs is there only where these kernels run.
        from kernels.ahead import compile_kernels

        compile_kernels(drafts=network.mtp is not None and network.mtp.chain is not None)
    warm_up(model, config, policy.num_drafts, pools.decode_ring)
    phase.done("warm-up", f"{threads} threads")
    if pools.buffers is not None:
        buckets = graph_buckets(config.max_batch_size, policy.num_drafts, pools.buffers.rows)
        model.capture(buckets, pools.buffers, CudaCapture(model.device))
        phase.done("graphs", f"{len(buckets)} CUDA graphs")
    eos = model_config.eos_token_ids
    masks = grammar_masks(config.model_dir, model_config.vocab_size, eos)
    costs = calibrate(config, model, found.kv_blocks, model.explore_threads)
    if costs:
        pools.states.bytes_moved = 0
        phase.done("calibration", f"steps timed at {len(costs)} widths")
    core = EngineCore(
        config,
        model,
        kv_blocks=found.kv_blocks,
        eos_ids=frozenset(eos),
        masks=masks,
        keeper=model,
        reuse_decoded=reuses_decoded(config, model, ops),
        watchdogs=_watchdogs(config, model, pools.decode_ring),
        costs=costs,
        compiles=CompileCounter().count,
    )
    info = BuiltInfo(model_config.vocab_size, eos, ops.name, grammar=masks is not None)
    return BuiltEngine(core, info, found, model, () if masks is None else (masks.start,))


def choose_ops(config: EngineConfig) -> Ops:
    """The operators; `auto` is cpu on a CPU in float32, triton on a card, else naive.

    Raises:
        ConfigError: the asked-for form does not run on this device or in this dtype.
    """
    wanted, dtype = config.kernels, DTYPES[config.dtype]
    if wanted == "auto":
        on_cpu = "cpu" if config.dtype == "float32" else "naive"
        wanted = "triton" if config.device == "cuda" else on_cpu
    if wanted == "naive":
        if config.batch_invariant and config.device != "cpu":
            raise ConfigError(
                f"--batch-invariant on {config.device} needs products of fixed tiles, which "
                "--kernels naive has not; use --kernels triton"
            )
        return naive_ops(dtype)
    if wanted == "triton":
        if find_spec("triton") is None:
            raise ConfigError(
                f"--kernels triton on {config.device}: the package triton is not installed; "
                "install it or use --kernels naive"
            )
        return triton_ops(dtype, batch_invariant=config.batch_invariant)
    if config.device != "cpu" or config.dtype != "float32":
        raise ConfigError(
            f"--kernels cpu runs float32 on a CPU, not {config.dtype} on {config.device}; "
            "use --kernels naive or --dtype float32 --device cpu"
        )
    return cpu_ops()


def check_supported(ops: Ops, model: ModelConfig, config: EngineConfig) -> None:
    """Refuse, before a weight is read, a model that the chosen operators have no kernel for.

    Raises:
        ConfigError: names operator, dtype, size and device, and the way out.
    """
    if ops.name != "triton":
        return
    gdn, attention = bool(model.gdn_layers), bool(model.attention_layers or model.mtp_layers)
    sizes = ModelSizes(
        key_width=model.linear_key_head_dim if gdn else 0,
        value_width=model.linear_value_head_dim if gdn else 0,
        head_dim=model.head_dim if attention else 0,
        hidden=model.hidden_size,
        experts=model.num_experts,
        vocabulary=model.vocab_size,
    )
    try:
        check_triton(sizes, DTYPES[config.dtype], torch.device(config.device))
    except MissingKernelError as error:
        raise ConfigError(f"{error}; or use --kernels naive") from error


def reuses_decoded(config: EngineConfig, model: HybridModel, ops: Ops) -> bool:
    """Whether the prefix cache may keep what decode steps computed, and says so."""
    if not (config.prefix_caching and config.snapshot_slots):
        return False
    exact = ops.one_form and forms_agree(model)
    if exact:
        said = "prompts and answers are reused, bit for bit"
    elif config.prefix_cache_exact:
        said = "prompts are reused, answers are not: decode steps round differently here"
    else:
        said = "prompts and answers are reused, answers with another rounding than recomputed"
    logger.info("Prefix cache of %d checkpoints: %s", config.snapshot_slots, said)
    return exact or not config.prefix_cache_exact


def _watchdogs(config: EngineConfig, model: HybridModel, ring: StateSnapshots) -> Watchdogs | None:
    """The watchdogs, when they are on; without a tokenizer they cut outputs at no boundary."""
    if not config.watchdogs:
        return None
    boundaries = b""
    if (Path(config.model_dir) / "tokenizer.json").is_file():
        vocabulary = load_vocabulary(Path(config.model_dir), model.vocab_size, ())
        boundaries = boundary_mask(vocabulary.pieces)
    return Watchdogs(ring, config.max_batch_size, model.fold, boundaries)


class _Phases:
    """Seconds between one phase and the next."""

    def __init__(self, progress: PhaseDone) -> None:
        self._progress = progress
        self._clock: Callable[[], float] = time.perf_counter
        self._began = self._clock()

    def done(self, phase: str, detail: str) -> None:
        now = self._clock()
        self._progress(phase, now - self._began, detail)
        self._began = now
