"""Stage `transformers`: a random checkpoint on disk, and the tokens it gives there and here."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.engines import engine_config, generate, request
from benchmarks.gpu.geometries import geometry
from benchmarks.gpu.options import Options
from benchmarks.gpu.rows import Row, Status, verdict
from benchmarks.gpu.runner import Emit
from engine.build import build_engine

STAGE = "transformers"
CLASSES = ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig")
PROMPTS = (100, 64)
# A first difference counts as a tie when the two best logits of transformers are this close.
TIE = 1e-3


def run(name: str, options: Options, emit: Emit) -> None:
    """Emit whether greedy float32 tokens are equal; a missing class is a named skip."""
    try:
        import transformers
    except ImportError:
        emit(Row(STAGE, name, Status.SKIP, "transformers is not installed"))
        return
    missing = [wanted for wanted in CLASSES if not hasattr(transformers, wanted)]
    if missing:
        text = f"transformers {transformers.__version__} has no {' and no '.join(missing)}"
        emit(Row(STAGE, name, Status.SKIP, text))
        return
    with tempfile.TemporaryDirectory() as folder:
        model = _saved(transformers, geometry(name), Path(folder), options.device)
        tokens = 8 if options.smoke else 32
        ours = _ours(Path(folder), options, tokens)
        for length, mine in zip(PROMPTS, ours, strict=True):
            emit(_compared(model, length, mine))


def _saved(transformers: Any, config: Mapping[str, Any], folder: Path, device: str) -> Any:
    """A model of random weights that bfloat16 holds exactly, saved as such; float32 in memory."""
    text = dict(config.get("text_config", config))
    text.pop("model_type", None)
    text.pop("dtype", None)
    text |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**text))
    model = model.eval().to(torch.bfloat16)
    model.save_pretrained(folder)
    return model.float()


def _ours(folder: Path, options: Options, tokens: int) -> list[tuple[int, ...]]:
    """Our tokens for every prompt, all in one batch."""
    length = 64 * -(-(max(PROMPTS) + tokens) // 64)
    config = replace(engine_config(options, len(PROMPTS), length, "float32"), model_dir=str(folder))
    engine = build_engine(config, lambda phase, seconds, detail="": None)
    asked = [request(n, prompt, tokens) for n, prompt in enumerate(PROMPTS)]
    found = generate(engine.core, asked)
    del engine
    gc.collect()
    return found


@torch.inference_mode()
def _compared(model: Any, length: int, mine: tuple[int, ...]) -> Row:
    number = PROMPTS.index(length)
    ids = torch.tensor([request(number, length).prompt_ids], device=model.device)
    out = model.generate(ids, max_new_tokens=len(mine), do_sample=False, eos_token_id=None)
    right = tuple(int(token) for token in out[0, length:])
    name = f"prompt of {length}, {len(mine)} tokens"
    if mine == right:
        numbers = {"equal": len(mine), "kinds": len(set(mine))}
        return Row(STAGE, name, Status.OK, "all equal, float32", numbers)
    equal = next(i for i, (a, b) in enumerate(zip(mine, right, strict=True)) if a != b)
    best = model(out[:, : length + equal]).logits[0, -1].topk(2).values
    gap = float(best[0] - best[1])
    text = f"the first {equal} equal, then two logits {gap:.1e} apart (a tie below {TIE:.0e})"
    return Row(STAGE, name, verdict(gap < TIE), text, {"equal": equal, "gap": gap})
