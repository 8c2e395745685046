"""Every family through HTTP, scheduler and model: greedy texts against transformers' own.

More requests than slots, prompts on both sides of the 64 grid and longer than one step's budget, so
that queueing, chunked prefill and mixed steps all take part.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from string import ascii_lowercase as letters
from typing import Any

import httpx
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.load.processes import spawned_server
from tests.oracle.checkpoints import VOCAB, Oracle
from tests.oracle.test_logits import prompt

pytestmark = pytest.mark.server

SPECIAL = ("<pad>", "<bos>", "<eos>")
TEMPLATE = "{% for m in messages %}<bos>{{ m.role }}{{ m.content }}{% endfor %}<eos>"
FLAGS = ["--max-batch-size", "3", "--max-seq-len", "512", "--max-prefill-tokens", "64"]
LENGTHS = (1, 3, 63, 65, 130, 200)
NEW_TOKENS = 20
# Two logits closer than this may change places: twice the tolerance of the logits, and some more.
CLEAR = 1e-3


def tokenizer() -> Tokenizer:
    """256 ids: three special ones, the letters, and pairs of letters; ids follow from a text."""
    pairs = [a + b for a in letters for b in letters][: VOCAB - len(SPECIAL) - len(letters)]
    vocabulary = {piece: i for i, piece in enumerate([*SPECIAL, *letters, *pairs])}
    made = Tokenizer(models.BPE(vocabulary, [(pair[0], pair[1]) for pair in pairs]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    assert made.get_vocab_size() == VOCAB
    return made


def model_folder(oracle: Oracle, base: Path) -> Path:
    """The checkpoint with a tokenizer beside it."""
    folder = base / "tiny-random"
    shutil.copytree(oracle.folder, folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def clear_greedy(oracle: Oracle, ids: list[int]) -> list[int] | None:
    """Transformers' greedy continuation, or None where rounding could turn a choice."""
    new = oracle.greedy(ids, NEW_TOKENS)
    top = oracle.logits([*ids, *new])[len(ids) - 1 : -1].topk(2).values
    return new if float((top[:, 0] - top[:, 1]).min()) > CLEAR else None


def clear_prompt(oracle: Oracle, length: int) -> tuple[list[int], list[int]]:
    """A random prompt of that length and its continuation."""
    for seed in range(50):
        ids = prompt(length, seed)
        new = clear_greedy(oracle, ids)
        if new is not None:
            return ids, new
    raise AssertionError(f"no prompt of {length} tokens has a clear continuation")


def clear_chat(oracle: Oracle, folder: Path) -> tuple[list[dict[str, str]], list[int], list[int]]:
    """A message, its ids as transformers' tokenizer renders them, and the continuation."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    for word in ("lantern", "harbour", "window", "meadow", "thunder", "violin"):
        messages = [{"role": "user", "content": word}]
        ids = theirs.apply_chat_template(messages, return_dict=False)
        new = clear_greedy(oracle, ids)
        if new is not None:
            return messages, ids, new
    raise AssertionError("no word has a clear continuation")


async def ask(folder: Path, jobs: Sequence[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Answers of a server for `folder` to all (path, body) at once."""
    env = os.environ | {"PYTHONWARNINGS": "error"}
    common = {"temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True}
    async with (
        spawned_server([str(folder), *FLAGS], env=env) as (target, _),
        httpx.AsyncClient(base_url=f"http://{target.host}:{target.port}", timeout=50) as client,
    ):
        sent = [client.post(path, json=common | body) for path, body in jobs]
        answers = await asyncio.gather(*sent)
    for answer in answers:
        assert answer.status_code == 200, answer.text
    return [answer.json() for answer in answers]


@pytest.mark.parametrize(
    ("family", "ratio"), [("qwen3_5", 3), ("qwen3_5_moe", 2), ("qwen3_next", 3)]
)
def test_greedy_texts(
    oracles: Callable[[str, int], Oracle], tmp_path: Path, family: str, ratio: int
) -> None:
    torch.set_num_threads(1)
    oracle = oracles(family, ratio)
    folder = model_folder(oracle, tmp_path)
    words = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = [clear_prompt(oracle, length) for length in LENGTHS]
    messages, chat_ids, chat_new = clear_chat(oracle, folder)

    jobs: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": ids}) for ids, _ in prompts
    ]
    jobs.append(("/v1/chat/completions", {"messages": messages}))
    *completions, chat = asyncio.run(ask(folder, jobs))

    for (ids, new), answer in zip(prompts, completions, strict=True):
        assert answer["choices"][0]["text"] == words.decode(new)
        assert answer["usage"]["prompt_tokens"] == len(ids)
        assert answer["usage"]["completion_tokens"] == NEW_TOKENS
    assert chat["choices"][0]["message"]["content"] == words.decode(chat_new)
    assert chat["usage"]["prompt_tokens"] == len(chat_ids)
