"""`spark plan`: what a model would take on a device that need not be here, as tables or as JSON.

Turns words into a question for `engine.reserve.plan`; computes nothing itself, loads no torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

from engine.config import GRID, EngineConfig
from engine.errors import ConfigError, DoesNotFitError
from engine.reserve.decode_ring import DECODE_RING_FIT_LADDER
from engine.reserve.explain import explain
from engine.reserve.ladder import DEFAULT_LADDER
from engine.reserve.memory import HOST_RESERVE_PART, DeviceMemory, MemoryKind, host_memory
from engine.reserve.parameters import resident_bytes
from engine.reserve.plan import (
    WIDEST_BATCH,
    ModePlan,
    PlanCase,
    PlanLimits,
    checkpoint_tensors,
    plan_case,
    plan_limits,
    read_model,
    rollback_modes,
)
from engine.reserve.preflight import Preflight, fewest_blocks
from engine.reserve.sizes import parse_size
from engine.reserve.ssm_reserve import (
    DISPATCH_CAP,
    DISPATCH_CAP_WITHOUT_LADDER,
    SpeculationPolicy,
    SsmRollbackMode,
)
from spark_server.plan_preset import preset_words
from spark_server.plan_view import PlanView, print_explanation, print_plan

DEFAULT_LENGTH = 4096
DEFAULT_BATCH = 32
DEFAULT_PREFILL = 512
DEFAULT_SNAPSHOTS = 16


class _Parser(argparse.ArgumentParser):
    """Errors are one line, as those of every other command."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


@dataclass(frozen=True, slots=True)
class _Answer:
    """All that is printed; `found` is None and `refusal` says why when it does not fit."""

    case: PlanCase
    found: Preflight | None
    refusal: DoesNotFitError | None
    limits: PlanLimits
    modes: tuple[ModePlan, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the preflight's values, or the least ledger when it does not fit."""
        case = self.case
        if self.found is not None:
            values = self.found.as_dict()
        else:
            values = case.reserve.least(case.config).as_dict()
            values["budget_bytes"] = case.budget.bytes
        return {
            **values,
            "fits": self.found is not None,
            "error": None if self.refusal is None else str(self.refusal),
            "budget_why": case.budget.why,
            "device_memory": {
                "kind": case.memory.kind.value,
                "total_bytes": case.memory.total,
                "available_bytes": case.memory.available,
                "host_reserve_bytes": case.memory.reserve,
            },
            "limits": self.limits.as_dict(),
            "rollback_modes": [mode.as_dict() for mode in self.modes],
        }


def main(words: Sequence[str]) -> int:
    """Print the plan; a plan that does not fit is printed too, and then refused.

    Raises:
        ConfigError: what does not fit or cannot work.
        ModelFormatError: the model cannot be served.
    """
    asked = _parser().parse_args(_with_preset(list(words)))
    case, stored = _case(asked)
    if asked.explain is not None:
        _explain(case, asked.explain, as_json=asked.json)
        return 0
    answer = _answer(case, asked, stored)
    if asked.json:
        print(json.dumps(answer.as_dict(), indent=2))
    else:
        ledger = case.reserve.least(case.config) if answer.found is None else None
        print_plan(PlanView(case, answer.found, ledger, answer.limits, answer.modes))
    if answer.refusal is not None:
        sys.stdout.flush()
        raise answer.refusal
    return 0


def _answer(case: PlanCase, asked: argparse.Namespace, source: Path) -> _Answer:
    found, refusal = None, None
    try:
        found = case.preflight()
    except DoesNotFitError as error:
        refusal = error
    given = _size(asked.weights_bytes, "--weights-bytes")

    def weights_of(with_mtp: bool) -> int:
        if given is not None:
            return given
        model = case.reserve.model
        stored = checkpoint_tensors(source, model)
        return resident_bytes(stored, model, case.config, with_mtp=with_mtp)

    return _Answer(case, found, refusal, plan_limits(case), rollback_modes(case, weights_of))


def _explain(case: PlanCase, name: str, *, as_json: bool) -> None:
    """A plan that does not fit is explained with the smallest KV pool that is allowed."""
    try:
        found = case.preflight()
        ledger, blocks = found.ledger, found.kv_blocks
    except DoesNotFitError:
        blocks = fewest_blocks(case.config)
        ledger = case.reserve.least(case.config)
    told = explain(case.reserve, case.config, ledger, blocks, name, case.parts)
    if as_json:
        values = {"name": told.term.name, "bytes": told.term.bytes, "kind": told.term.kind.value}
        print(json.dumps(values | {"words": told.words, "numbers": told.numbers}, indent=2))
    else:
        print_explanation(told)


def _case(asked: argparse.Namespace) -> tuple[PlanCase, Path]:
    source = locate(asked.model)
    model = read_model(source)
    length = asked.max_seq_len or min(model.max_position_embeddings, DEFAULT_LENGTH)
    dtype = asked.dtype or ("bfloat16" if asked.device == "cuda" else "float32")
    config = EngineConfig(
        model_dir=str(source),
        device=asked.device,
        dtype=dtype,
        max_batch_size=asked.max_batch_size,
        max_seq_len=length,
        max_prefill_tokens=_whole_grid(asked.max_prefill_tokens),
        memory_budget=_size(asked.memory_budget, "--memory-budget"),
        kv_tokens=asked.kv_tokens,
        kernels=asked.kernels,
        snapshot_slots=asked.ssm_cache_slots,
        decode_ring_slots=asked.ssm_decode_ring_slots,
        h_f16_pool=asked.ssm_h_dtype == "f16-pool",
    )
    if config.memory_budget is not None and asked.gpu_memory_utilization is not None:
        raise ConfigError(
            "--memory-budget and --gpu-memory-utilization contradict each other; "
            "give only one of them"
        )
    if config.kernels == "cpu" and (config.device, config.dtype) != ("cpu", "float32"):
        raise ConfigError(
            f"--kernels cpu runs float32 on a CPU, not {config.dtype} on {config.device}; "
            "use --kernels naive or --dtype float32 --device cpu"
        )
    case = plan_case(
        source,
        config,
        _memory(asked),
        share=asked.gpu_memory_utilization,
        weights_bytes=_size(asked.weights_bytes, "--weights-bytes"),
        policy=_policy(asked),
    )
    return case, source


def _policy(asked: argparse.Namespace) -> SpeculationPolicy:
    cap = DISPATCH_CAP_WITHOUT_LADDER if asked.no_ladder else DISPATCH_CAP
    return SpeculationPolicy(
        num_drafts=asked.num_drafts,
        rollback=SsmRollbackMode(asked.ssm_rollback_mode),
        dispatch_cap=cap if asked.mtp_max_seqs is None else asked.mtp_max_seqs,
        ladder=None if asked.no_ladder else DEFAULT_LADDER,
        full_width=asked.full_width,
    )


def _memory(asked: argparse.Namespace) -> DeviceMemory:
    """The pretended device, which nobody else uses, or this machine's memory as it is now."""
    total = _size(asked.device_memory, "--device-memory")
    reserve = _size(asked.host_reserve, "--host-reserve")
    if total is None:
        if asked.device == "cuda":
            raise ConfigError("--device cuda needs --device-memory, e.g. --device-memory 80GiB")
        return host_memory(reserve)
    if total == 0:
        raise ConfigError("--device-memory 0 is no device; write 24GB, 80GiB or plain bytes")
    if asked.device == "cpu":
        default = total // HOST_RESERVE_PART
        return DeviceMemory(MemoryKind.HOST, total, total, default if reserve is None else reserve)
    kind = MemoryKind.DEVICE if reserve is None else MemoryKind.UNIFIED
    return DeviceMemory(kind, total, total, reserve or 0)


def locate(model: str) -> Path:
    """A path as it is, a model that comes with the package, or a geometry by its name.

    Raises:
        ConfigError: there is no such thing.
    """
    path = Path(model).expanduser()
    if path.exists():
        return path
    geometries = Path(str(files("configs") / "geometries"))
    packaged = Path(str(files("spark_server") / "assets")) / model
    for place in (packaged, geometries / f"{model}.json"):
        if path.name == model and place.exists():
            return place
    names = ", ".join(sorted(place.stem for place in geometries.iterdir()))
    raise ConfigError(
        f"{model} is no model folder and no config.json here; for a model that is elsewhere give "
        f"the path of its config.json, or one of {names}"
    )


def _with_preset(words: list[str]) -> list[str]:
    """A preset in the place of the model becomes the words that it stands for, before the others.

    argparse takes the last value of an option, so that the command line wins.
    """
    presets = [word for word in words if word.endswith(".toml") and not word.startswith("-")]
    if not presets:
        return words
    words.remove(presets[0])
    limits = ("--memory-budget", "--gpu-memory-utilization", "--memory-utilization")
    given = any(word.split("=")[0] in limits for word in words)
    return [*preset_words(presets[0], with_budget=not given), *words]


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="spark plan",
        description="Print what a model would take, by term, without its weights and without a "
        "GPU, and how far batch size, length and utilisation go",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "model",
        help="a model folder, the path of a config.json, a preset (.toml), spark-tiny, or the "
        "name of a geometry such as qwen3.6-27b",
    )
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where it would run")
    add("--device-memory", metavar="SIZE", help="memory of that device, e.g. 24GB or 80GiB")
    add(
        "--gpu-memory-utilization",
        "--memory-utilization",
        type=_share,
        metavar="SHARE",
        help="share of it that the engine may take",
    )
    add("--memory-budget", metavar="SIZE", help="instead of a share, e.g. 1.5GiB")
    add(
        "--host-reserve",
        metavar="SIZE",
        help="memory kept free for the host, on a CPU or on a GPU that shares the host's memory",
    )
    add("--weights-bytes", metavar="SIZE", help="stands in for the weights in memory")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="of the activations")
    kernels = ("auto", "naive", "cpu", "triton")
    add("--kernels", choices=kernels, default="auto", help="form of the operators")
    add(
        "--max-batch-size",
        type=_batch,
        default=DEFAULT_BATCH,
        metavar="N",
        help="sequences that run at once",
    )
    add("--max-seq-len", type=_count, metavar="TOKENS", help="prompt and output together")
    add(
        "--max-prefill-tokens",
        type=_count,
        default=DEFAULT_PREFILL,
        metavar="TOKENS",
        help="prompt tokens of a step",
    )
    add("--kv-tokens", type=_count, metavar="TOKENS", help="instead of what the budget leaves")
    add("--num-drafts", type=_amount, default=0, metavar="N", help="0 is no speculation")
    add(
        "--ssm-rollback-mode",
        choices=[mode.value for mode in SsmRollbackMode],
        default=SsmRollbackMode.CARRY.value,
        help="of rejected drafts",
    )
    add("--mtp-max-seqs", type=_amount, metavar="N", help="widest batch that speculates")
    add("--full-width", action="store_true", help="every slot may speculate")
    add("--no-ladder", action="store_true", help="as many drafts at every width")
    add(
        "--ssm-cache-slots",
        "--snapshots",
        type=_amount,
        default=DEFAULT_SNAPSHOTS,
        metavar="N",
        help="states kept for the prefix cache",
    )
    add(
        "--ssm-decode-ring-slots",
        type=_depth,
        default=0,
        metavar="N",
        help="states of each sequence that a watchdog can go back to, 0 to 8",
    )
    add(
        "--ssm-h-dtype",
        choices=("f32", "f16-pool"),
        default="f32",
        help="how recurrent states are stored",
    )
    add("--json", action="store_true", help="print JSON instead of tables")
    add("--explain", metavar="TERM", help="the formula of one term, with its numbers")
    return parser


def _share(text: str) -> float:
    if text.strip().endswith("%"):
        raise argparse.ArgumentTypeError(f"{text!r} is no share; write 0.8 for 80 percent")
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number; write 0.8") from None
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{value:g} is not a share; use more than 0 and at most 1")
    return value


def _batch(text: str) -> int:
    value = _count(text)
    if value > WIDEST_BATCH:
        raise argparse.ArgumentTypeError(f"{value} is above {WIDEST_BATCH}")
    return value


def _depth(text: str) -> int:
    value = _amount(text)
    if value > DECODE_RING_FIT_LADDER[0]:
        raise argparse.ArgumentTypeError(f"{value} is above {DECODE_RING_FIT_LADDER[0]}")
    return value


def _count(text: str) -> int:
    value = _amount(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def _amount(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 on")
    return int(text)


def _whole_grid(tokens: int) -> int:
    if tokens < GRID:
        raise ConfigError(f"--max-prefill-tokens {tokens} is below {GRID}; use {GRID} or more")
    return tokens - tokens % GRID


def _size(text: str | None, flag: str) -> int | None:
    if text is None:
        return None
    try:
        return parse_size(text)
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from None
