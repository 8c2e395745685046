"""Stage `invariant`: with --batch-invariant the same tokens in any company, and what that costs."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.gpu.engines import (
    PROMPT,
    built,
    engine_config,
    free,
    generate,
    request,
    speculation,
    timed_steps,
)
from benchmarks.gpu.options import Options
from benchmarks.gpu.reference import ReferenceRunner
from benchmarks.gpu.rows import Row, Status, error_row, verdict
from benchmarks.gpu.runner import Emit
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.reserve.ssm_reserve import SsmRollbackMode

STAGE = "invariant"
LENGTH = 128
DRAFTS = 3

Answers = list[tuple[int, ...]]


def run(name: str, options: Options, emit: Emit) -> None:
    """Emit whether tokens are equal alone, in a batch and with drafts, and the cost per step."""
    width, tokens = (4, 8) if options.smoke else (32, 40)
    dtype = "float32" if options.device == "cpu" else "bfloat16"
    usual = engine_config(options, width, LENGTH, dtype)
    fixed = replace(usual, batch_invariant=True)
    together = _answers(name, fixed, options, emit, tokens)
    for mode in SsmRollbackMode:
        try:
            emit(_speculative(name, fixed, mode, together))
        except Exception as error:
            emit(error_row(STAGE, f"with drafts, {mode.value}", error))
        free(options.device)
    _cost(name, usual, fixed, options, emit)


def _answers(name: str, config: EngineConfig, options: Options, emit: Emit, tokens: int) -> Answers:
    """All requests together; some of them again, alone."""
    width = config.max_batch_size
    with built(name, config) as engine:
        together = generate(engine.core, [request(n, max_tokens=tokens) for n in range(width)])
        chosen = sorted({0, width // 2, width - 1})
        alone = [generate(engine.core, [request(n, max_tokens=tokens)])[0] for n in chosen]
    free(options.device)
    different = sum(together[n] != answer for n, answer in zip(chosen, alone, strict=True))
    text = f"{len(chosen)} requests alone and among {width}, {tokens} tokens, {different} differ"
    numbers = {"requests": len(chosen), "different": different, "kinds": len(set(together))}
    emit(Row(STAGE, f"batch 1 and {width}", verdict(not different), text, numbers))
    return together


def _speculative(name: str, config: EngineConfig, mode: SsmRollbackMode, want: Answers) -> Row:
    """The same requests with drafts of which about half come true."""
    width, tokens = config.max_batch_size, len(want[0])
    config = replace(config, speculation=speculation(mode, width, DRAFTS))
    with built(name, config) as engine:
        runner = ReferenceRunner(engine.model, want, PROMPT, 0.6)
        core = EngineCore(config, runner, kv_blocks=engine.ledger.kv_blocks)
        found = generate(core, [request(n, max_tokens=tokens) for n in range(width)])
        spec = core.stats().speculation
    assert spec is not None
    different = sum(a != b for a, b in zip(found, want, strict=True))
    text = (
        f"{width} requests of {tokens} tokens, {different} differ, "
        f"{spec.accepted_tokens} of {spec.draft_tokens} drafts came true"
    )
    both = 0 < spec.accepted_tokens < spec.draft_tokens
    numbers = {
        "different": different,
        "accepted": spec.accepted_tokens,
        "drafted": spec.draft_tokens,
    }
    return Row(STAGE, f"with drafts, {mode.value}", verdict(both and not different), text, numbers)


def _cost(
    name: str, usual: EngineConfig, fixed: EngineConfig, options: Options, emit: Emit
) -> None:
    widths = (1, usual.max_batch_size)
    seconds: dict[str, list[float]] = {}
    for what, config in (("usual", usual), ("fixed", fixed)):
        with built(name, config) as engine:
            steps = 3 if options.smoke else 16
            seconds[what] = [timed_steps(engine.core, w, steps).seconds for w in widths]
        free(options.device)
    for width, before, after in zip(widths, seconds["usual"], seconds["fixed"], strict=True):
        text = f"{after * 1e3:.2f} ms instead of {before * 1e3:.2f}, {after / before:.2f} x"
        numbers = {"seconds": after, "usual_seconds": before, "cost": after / before}
        emit(Row(STAGE, f"cost at {width}", Status.INFO, text, numbers))
