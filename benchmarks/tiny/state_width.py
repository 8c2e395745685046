"""What storing the recurrent state in float16 does to a model: logits and held-out loss.

Runs held-out documents as prompts and token by token, over a float32 pool and over a float16 one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from benchmarks.tiny import corpus, data
from engine.build import BuiltEngine, build_engine
from engine.config import GRID, EngineConfig
from engine.runner import RowPhase, Segment

_TOKENS = 960


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table, then one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tiny.state_width")
    parser.add_argument("--model", default=str(files("spark_server") / "assets" / "spark-tiny"))
    parser.add_argument("--documents", type=int, default=20, help="of the held-out corpus")
    asked = parser.parse_args(argv)
    texts = documents(Path(asked.model), asked.documents)
    wide, half = engine(asked.model, h_f16_pool=False), engine(asked.model, h_f16_pool=True)
    numbers: dict[str, float] = {"documents": len(texts), "tokens": sum(map(len, texts))}
    for form, rows in (("prompt", _TOKENS), ("token by token", 1)):
        numbers |= {f"{form}: {k}": v for k, v in compare(wide, half, texts, rows).items()}
    for name, value in numbers.items():
        print(f"{name:50} {value:.6g}")
    print(json.dumps(numbers))
    return 0


def documents(folder: Path, count: int) -> list[list[tuple[int, float]]]:
    """Ids and weights of held-out documents, several in a row so that states grow old."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
    encoder = data.Encoder(tokenizer)
    encoded = (encoder.encode(doc) for doc in corpus.documents(999, held_out=True))
    pairs = itertools.chain.from_iterable(zip(*each, strict=True) for each in encoded)
    return [list(itertools.islice(pairs, _TOKENS)) for _ in range(count)]


def engine(folder: str, *, h_f16_pool: bool) -> BuiltEngine:
    """One slot over a pool of the given width."""
    config = EngineConfig(
        folder,
        max_batch_size=1,
        max_seq_len=1024,
        max_prefill_tokens=1024,
        memory_budget=3 << 30,
        threads=1,
        h_f16_pool=h_f16_pool,
    )
    return build_engine(config, lambda phase, seconds, detail="": None)


@torch.inference_mode()
def compare(
    wide: BuiltEngine, half: BuiltEngine, texts: Sequence[list[tuple[int, float]]], rows: int
) -> dict[str, float]:
    """Over all tokens: losses, differences of logits, and how often the best token is another."""
    loss, everything = [0.0, 0.0], [0.0, 0.0]
    worst = total = divergence = 0.0
    other = count = said = 0
    for text in texts:
        ids = [token for token, _ in text]
        strong = torch.tensor([weight for _, weight in text][1:]) > 0.5
        a, b = (logits_of(built, ids, rows)[:-1] for built in (wide, half))
        right = torch.tensor(ids[1:])
        for n, logits in enumerate((a, b)):
            each = torch.nn.functional.cross_entropy(logits, right, reduction="none")
            loss[n] += float(each[strong].sum())
            everything[n] += float(each.sum())
        worst = max(worst, float((a - b).abs().max()))
        total += float((a - b).abs().mean(-1).sum())
        divergence += float(
            torch.nn.functional.kl_div(
                b.log_softmax(-1), a.log_softmax(-1), log_target=True, reduction="sum"
            )
        )
        other += int((a.argmax(-1) != b.argmax(-1)).sum())
        count += len(right)
        said += int(strong.sum())
    return {
        "loss, float32 state": loss[0] / said,
        "loss, float16 state": loss[1] / said,
        "loss of everything, float32 state": everything[0] / count,
        "loss of everything, float16 state": everything[1] / count,
        "largest difference of a logit": worst,
        "mean difference of a logit": total / count,
        "KL divergence a token": divergence / count,
        "share of tokens with another best": other / count,
    }


def logits_of(built: BuiltEngine, ids: list[int], rows: int) -> Tensor:
    """[tokens, V] of one text in segments of `rows` rows; more than one is a prompt's form."""
    model = built.model
    blocks = tuple(range(-(-len(ids) // GRID)))
    model.claim_slot(0)
    phase = RowPhase.PREFILL if rows > 1 else RowPhase.DECODE
    parts = []
    for start in range(0, len(ids), rows):
        part = tuple(ids[start : start + rows])
        segment = Segment(0, start, part, phase, len(part), blocks, len(part))
        parts.append(model.forward([segment]).logits.clone())
    return torch.cat(parts)


if __name__ == "__main__":
    sys.exit(main())
