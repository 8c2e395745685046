"""`spark plan`: the ledger of a model that need not be here. Uses no torch and opens no socket."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from engine.config import GRID, EngineConfig
from engine.errors import ConfigError, ModelFormatError
from engine.reserve.parameters import (
    StoredTensor,
    resident_bytes,
    tensors_of_config,
    tensors_of_headers,
)
from engine.reserve.preflight import FurtherTerms, Preflight, device_budget, preflight_reserve
from engine.reserve.sizes import parse_size
from engine.reserve.ssm_reserve import DISPATCH_CAP, SpeculationPolicy, SsmRollbackMode
from engine.reserve.table import preflight_table
from engine.reserve.verify_terms import snapshot_term
from engine.weights.headers import tensor_headers
from engine.weights.model_config import ModelConfig, load_config, parse_config

_DEFAULT_LENGTH = 4096
# The model that comes with the package lies beside it; `engine` imports nothing of the server.
_PACKAGED = Path(__file__).resolve().parents[2] / "spark_server" / "assets"


def plan(
    source: Path,
    config: EngineConfig,
    *,
    device_memory: int,
    utilisation: float | None = None,
    weights_bytes: int | None = None,
    policy: SpeculationPolicy | None = None,
    further: FurtherTerms = lambda config: (),
) -> Preflight:
    """The preflight of a model folder or of a config.json alone.

    Args:
        source: folder, or path of a config.json.
        config: `model_dir` is not read; `memory_budget` wins over `utilisation`.
        device_memory: bytes of the device.
        utilisation: share of it that the engine may take, None for the device's default.
        weights_bytes: stands in for the network's bytes in memory; else they come from the
            safetensors headers, or from the config when no weights are there.
        policy, further: see preflight_reserve.

    Raises:
        ModelFormatError: the model cannot be served.
        ConfigError: the length exceeds the model's, there is no drafter, or nothing fits.
    """
    model = read_model(source)
    if config.max_seq_len > model.max_position_embeddings:
        raise ConfigError(
            f"--max-seq-len {config.max_seq_len} exceeds the {model.max_position_embeddings} "
            f"positions of the model; use {model.max_position_embeddings} or less"
        )
    with_mtp = policy is not None and policy.num_drafts > 0
    if with_mtp and model.mtp_layers == 0:
        raise ConfigError("--num-drafts needs a model with MTP layers, and this one has none")
    if weights_bytes is None:
        tensors = checkpoint_tensors(source, model)
        weights_bytes = resident_bytes(tensors, model, config, with_mtp=with_mtp)
    budget = device_budget(
        device_memory, utilisation, device=config.device, memory_budget=config.memory_budget
    )
    return preflight_reserve(
        model,
        config,
        budget=budget,
        weights_bytes=weights_bytes,
        policy=policy,
        device_memory=device_memory,
        further=further,
    )


def read_model(source: Path) -> ModelConfig:
    """The config of a model folder, or of a config.json that lies alone.

    Raises:
        ModelFormatError: it cannot be read or the model cannot be served.
    """
    if not source.is_file():
        return load_config(source)
    try:
        parsed = json.loads(source.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFormatError(f"{source} cannot be read as JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ModelFormatError(f"{source} holds no JSON object")
    return parse_config(parsed)


def checkpoint_tensors(source: Path, model: ModelConfig) -> tuple[StoredTensor, ...]:
    """The tensors beside a config.json by their headers, or those that the config stands for.

    Raises:
        ModelFormatError: there are weights and they cannot be read.
    """
    folder = source if source.is_dir() else source.parent
    if any(folder.glob("*.safetensors")):
        return tensors_of_headers(tensor_headers(folder))
    return tensors_of_config(model)


def main(words: Sequence[str]) -> int:
    """The command line; prints the ledger as a table or as JSON.

    Raises:
        ConfigError: what does not fit or cannot work.
        ModelFormatError: the model cannot be served.
    """
    asked = _parser().parse_args(list(words))
    found = _plan_of(asked)
    print(json.dumps(found.as_dict(), indent=2) if asked.json else preflight_table(found))
    return 0


def _plan_of(asked: argparse.Namespace) -> Preflight:
    source = _locate(asked.model)
    model = read_model(source)
    length = asked.max_seq_len or min(model.max_position_embeddings, _DEFAULT_LENGTH)
    dtype = asked.dtype or ("bfloat16" if asked.device == "cuda" else "float32")
    config = EngineConfig(
        model_dir=str(source),
        device=asked.device,
        dtype=dtype,
        max_batch_size=asked.max_batch_size,
        max_seq_len=length,
        max_prefill_tokens=_whole_grid(asked.max_prefill_tokens),
        memory_budget=_size(asked.memory_budget),
        kv_tokens=asked.kv_tokens,
        kernels=asked.kernels,
    )
    policy = SpeculationPolicy(
        num_drafts=asked.num_drafts,
        rollback=SsmRollbackMode(asked.ssm_rollback_mode),
        dispatch_cap=asked.mtp_max_seqs,
    )
    snapshots = (snapshot_term(model, asked.snapshots),) if asked.snapshots else ()
    memory = _size(asked.device_memory)
    return plan(
        source,
        config,
        device_memory=_memory_here(asked.device) if memory is None else memory,
        utilisation=asked.gpu_memory_utilization,
        weights_bytes=_size(asked.weights_bytes),
        policy=policy,
        further=lambda config: snapshots,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spark plan",
        description="Print what a model would take, by term, without its weights and without a GPU",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", help="a model folder, the path of a config.json, or spark-tiny")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where it would run")
    add("--device-memory", metavar="SIZE", help="memory of that device, e.g. 80GiB")
    add(
        "--gpu-memory-utilization",
        "--memory-utilization",
        type=float,
        metavar="SHARE",
        help="share of it that the engine may take",
    )
    add("--memory-budget", metavar="SIZE", help="instead of a share, e.g. 1.5GiB")
    add("--weights-bytes", metavar="SIZE", help="stands in for the weights in memory")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="of the activations")
    add("--kernels", choices=("auto", "naive", "cpu"), default="auto", help="form of the operators")
    add("--max-batch-size", type=_count, default=32, metavar="N", help="sequences that run at once")
    add("--max-seq-len", type=_count, metavar="TOKENS", help="prompt and output together")
    add(
        "--max-prefill-tokens",
        type=_count,
        default=512,
        metavar="TOKENS",
        help="prompt tokens of a step",
    )
    add("--kv-tokens", type=_count, metavar="TOKENS", help="instead of what the budget leaves")
    add("--num-drafts", type=_amount, default=0, metavar="N", help="0 is no speculation")
    modes = [mode.value for mode in SsmRollbackMode]
    add(
        "--ssm-rollback-mode",
        choices=modes,
        default=SsmRollbackMode.CARRY.value,
        help="of rejected drafts",
    )
    add(
        "--mtp-max-seqs",
        type=_count,
        default=DISPATCH_CAP,
        metavar="N",
        help="widest batch that speculates",
    )
    add("--snapshots", type=_amount, default=0, metavar="N", help="of the prefix cache")
    add("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _count(text: str) -> int:
    value = _amount(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def _amount(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 on")
    return int(text)


def _whole_grid(tokens: int) -> int:
    if tokens < GRID:
        raise ConfigError(f"--max-prefill-tokens {tokens} is below {GRID}; use {GRID} or more")
    return tokens - tokens % GRID


def _size(text: str | None) -> int | None:
    return None if text is None else parse_size(text)


def _locate(model: str) -> Path:
    path = Path(model).expanduser()
    packaged = _PACKAGED / model
    if not path.exists() and Path(model).name == model and packaged.is_dir():
        return packaged
    return path


def _memory_here(device: str) -> int:
    if device == "cuda":
        raise ConfigError("--device cuda needs --device-memory, e.g. --device-memory 80GiB")
    import psutil

    return int(psutil.virtual_memory().total)
