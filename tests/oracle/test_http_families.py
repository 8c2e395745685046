"""Tiny models of every family behind a real server: its greedy tokens are those of transformers."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import httpx
import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from spark_server.text.tokenizer import Tokenizer
from tests.e2e.servers import serving
from tests.oracle.checkpoints import VOCAB, Oracle, make

pytestmark = pytest.mark.server
# Prompts of one token, of less and more than one chunk of the prefill, and of exactly one.
LENGTHS = [1, 5, 40, 64, 70, 130, 17, 9]
COUNT = 12
# Closer logits than this may change places between two ways to compute them.
CLEAR = 1e-3


def byte_tokenizer(folder: Path) -> None:
    """A tokenizer.json of 256 single bytes and no merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({char: n for n, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    assert tokenizer.get_vocab_size() == VOCAB
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({}))


def ids_of_names(folder: Path) -> dict[str, int]:
    """Token ids by the names that log-probabilities give them; a lone byte is spelled out."""
    tokenizer = Tokenizer((folder / "tokenizer.json").read_text())
    names = {}
    for token in range(VOCAB):
        (byte,) = tokenizer.token_bytes(token)
        names[chr(byte) if byte < 128 else f"bytes:\\x{byte:02x}"] = token
    assert len(names) == VOCAB
    return names


def prompts() -> list[list[int]]:
    g = torch.Generator().manual_seed(4)
    return [[int(t) for t in torch.randint(0, VOCAB, (n,), generator=g)] for n in LENGTHS]


def greedy(oracle: Oracle, ids: list[int]) -> list[int]:
    """Greedy tokens up to the first one that is a matter of taste; at most COUNT.

    Every token from a pass over the whole text: with its cache, transformers takes another form of
    the recurrence, which in random models like these differs by more than ours does.
    """
    found: list[int] = []
    while len(found) < COUNT:
        top = oracle.logits(ids + found)[-1].topk(2)
        if top.values[0] - top.values[1] < CLEAR:
            break
        found.append(int(top.indices[0]))
    return found


@pytest.mark.parametrize(
    ("family", "ratio", "seed"),
    [("qwen3_5", 3, 3), ("qwen3_5_moe", 2, 3), ("qwen3_next", 1, 2)],
    ids=lambda value: str(value),
)
def test_greedy_tokens_of_a_batch(tmp_path: Path, family: str, ratio: int, seed: int) -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    oracle = make(tmp_path, family, ratio, seed=seed)
    byte_tokenizer(tmp_path)
    work = prompts()
    want = [greedy(oracle, ids) for ids in work]
    assert sum(map(len, want)) > 0.7 * COUNT * len(work), "too few tokens to compare"
    words = ("--max-batch-size", "8", "--max-prefill-tokens", "64", "--served-model-name", family)
    with serving(str(tmp_path), *words, "--chat-template", "none") as server:
        body = {
            "model": family,
            "prompt": work,
            "max_tokens": COUNT,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 0,
        }
        answer = httpx.post(server.url + "/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        choices = answer.json()["choices"]
        assert answer.json()["usage"]["prompt_tokens"] == sum(LENGTHS)
    ids = ids_of_names(tmp_path)
    got = [[ids[name] for name in choice["logprobs"]["tokens"]] for choice in choices]
    for mine, theirs in zip(got, want, strict=True):
        assert len(mine) == COUNT
        assert mine[: len(theirs)] == theirs
