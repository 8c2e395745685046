"""The checkpoint that comes with the package: transformers and we give the same logits."""

from __future__ import annotations

import logging
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.runner import RowPhase
from spark_server.text.model import TextModel, load_text_model
from tests.oracle.ours import build, segment

FOLDER = Path(str(files("spark_server") / "assets" / "spark-tiny"))
# Two tokens whose logits are closer than this may change places.
TOLERANCE = 3e-4
CHATS = ["Hello!", "What is 7 plus 5?", "Tell me a story about a fox and a lantern.", "你好 🙂"]


@pytest.fixture(scope="module")
def theirs() -> Any:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    from transformers import Qwen3_5ForCausalLM

    model, info = Qwen3_5ForCausalLM.from_pretrained(
        FOLDER, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    return model.eval()


@pytest.fixture(scope="module")
def text() -> TextModel:
    return load_text_model(FOLDER)


def chat_ids(text: TextModel, chat: str) -> list[int]:
    return list(text.render_chat([{"role": "user", "content": chat}], None, {}).token_ids)


@pytest.fixture(scope="module")
def answers(theirs: Any, text: TextModel) -> list[tuple[int, list[int], Tensor]]:
    """Length of the prompt, ids of prompt and greedy answer, their logits; for every chat."""
    prompts = [chat_ids(text, chat) for chat in CHATS]
    return [(len(prompt), *continued(theirs, prompt, 12)) for prompt in prompts]


@torch.no_grad()
def continued(model: Any, ids: list[int], count: int) -> tuple[list[int], Tensor]:
    """A greedy continuation and the logits of all rows of both."""
    out = model.generate(
        torch.tensor([ids]), max_new_tokens=count, do_sample=False, eos_token_id=None
    )
    return [int(t) for t in out[0]], model(input_ids=out, use_cache=False).logits[0]


@pytest.mark.parametrize("kernels", ["cpu", "naive"])
def test_logits_and_greedy_tokens(
    answers: list[tuple[int, list[int], Tensor]], kernels: str
) -> None:
    ours = build(FOLDER, kernels)
    for slot, (length, ids, want) in enumerate(answers):
        got = [ours.forward([segment(slot, 0, ids[:length], RowPhase.PREFILL)]).logits]
        for position in range(length, len(ids)):
            row = segment(slot, position, [ids[position]], RowPhase.DECODE)
            got.append(ours.forward([row]).logits)
        logits = torch.cat(got)
        assert logits.shape == want.shape
        assert float((logits - want).abs().max()) <= TOLERANCE
        top = want.topk(2).values
        clear = top[:, 0] - top[:, 1] > 2 * TOLERANCE
        assert int(clear.sum()) > 0.9 * len(ids)
        assert torch.equal(logits.argmax(-1)[clear], want.argmax(-1)[clear])


def test_tokens_of_our_tokenizer(text: TextModel) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    for chat in CHATS:
        assert text.tokenizer.encode(chat) == tokenizer.encode(chat)
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": chat}], add_generation_prompt=True, tokenize=True
        )
        ids = rendered["input_ids"] if not isinstance(rendered, list) else rendered
        assert chat_ids(text, chat) == list(ids)
