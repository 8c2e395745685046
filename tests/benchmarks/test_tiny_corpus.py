"""The corpus, its tokenizer and its template: seeded, split, parseable, the same as what ships."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

from benchmarks.tiny import corpus, tokenizer
from benchmarks.tiny.template import CHAT_TEMPLATE

SHIPPED = Path(str(resources.files("spark_server") / "assets" / "spark-tiny"))
N = 1500


@pytest.fixture(scope="module")
def docs() -> list[corpus.Document]:
    return list(itertools.islice(corpus.documents(0), N))


@pytest.fixture(scope="module")
def shipped():  # type: ignore[no-untyped-def]
    return tokenizer.load(SHIPPED)


def test_the_same_seed_gives_the_same_documents(docs: list[corpus.Document]) -> None:
    assert list(itertools.islice(corpus.documents(0), N)) == docs
    assert list(itertools.islice(corpus.documents(1), 20)) != docs[:20]


def test_held_out_documents_are_never_in_training() -> None:
    train = {d.key() for seed in (0, 1) for d in itertools.islice(corpus.documents(seed), N)}
    held = {d.key() for d in itertools.islice(corpus.documents(0, held_out=True), 100)}
    assert len(held) > 80
    assert not held & train


def test_every_kind_of_document_appears(docs: list[corpus.Document]) -> None:
    kinds = {d.kind for d in docs}
    assert kinds >= {"prose", "raw", "fact", "arithmetic", "list", "json", "talk", "echo", "multi"}
    assert "tool" in kinds


def test_every_tool_document_parses(docs: list[corpus.Document], shipped) -> None:  # type: ignore[no-untyped-def]
    calls = 0
    for doc in (d for d in docs if d.kind == "tool"):
        text = tokenizer.render(shipped, doc)
        said = [m for m in doc.messages if "tool_calls" in m]
        wanted = [c["function"] for m in said for c in m["tool_calls"]]
        turns = text.split("<|im_start|>assistant\n")[1:]
        parsed = [call for turn in turns for call in corpus.parse_call(turn)]
        assert [name for name, _ in parsed] == [w["name"] for w in wanted]
        for (_, got), want in zip(parsed, wanted, strict=True):
            expected = want["arguments"].items()
            assert got == {k: v if isinstance(v, str) else json.dumps(v) for k, v in expected}
        names = {t["function"]["name"] for t in doc.tools}
        assert {w["name"] for w in wanted} <= names
        calls += len(parsed)
    assert calls > 100


@pytest.mark.parametrize(
    "text",
    [
        "👩‍👩‍👧‍👦 and 🇫🇷",
        "日本語と한국어",
        "e\u0301 against \u00e9, \u0928\u093f",
        "  two spaces\n\n\tand a tab \r\n",
        "<tool_call>\n<function=f>\n</function>\n</tool_call>",
        "\x00\x7f\u200b\ufeff\U0001d4d0",
    ],
)
def test_any_text_comes_back_from_its_tokens(shipped, text: str) -> None:  # type: ignore[no-untyped-def]
    ids = shipped(text, add_special_tokens=False)["input_ids"]
    assert shipped.decode(ids, clean_up_tokenization_spaces=False) == text


def test_the_shipped_template_is_the_one_of_training(shipped) -> None:  # type: ignore[no-untyped-def]
    assert (SHIPPED / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    assert shipped.chat_template == CHAT_TEMPLATE
    assert "<function=" in CHAT_TEMPLATE


def test_a_served_prompt_is_the_beginning_of_a_training_text(shipped) -> None:  # type: ignore[no-untyped-def]
    doc = next(d for d in corpus.documents(3) if d.tools and "tool_calls" in d.messages[-3])
    text = tokenizer.render(shipped, doc)
    for end in (-3, -1):
        prompt = shipped.apply_chat_template(
            doc.messages[:end], tools=doc.tools, tokenize=False, add_generation_prompt=True
        )
        if "reasoning_content" not in doc.messages[end]:
            assert text.startswith(prompt)
    assert "# Tools" in text
    assert all(json.dumps(tool, ensure_ascii=False) in text for tool in doc.tools)


def test_thinking_is_off_unless_asked_for(shipped) -> None:  # type: ignore[no-untyped-def]
    chat = [{"role": "user", "content": "Hi"}]
    options = {"tokenize": False, "add_generation_prompt": True}
    off = shipped.apply_chat_template(chat, **options)
    on = shipped.apply_chat_template(chat, enable_thinking=True, **options)
    assert off.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert on.endswith("<|im_start|>assistant\n<think>\n")


def test_control_tokens_have_the_last_ids(shipped) -> None:  # type: ignore[no-untyped-def]
    ids = list(tokenizer.token_ids(shipped).values())
    assert ids == list(range(2039, 2048))
    assert len(shipped) == tokenizer.VOCAB_SIZE
    assert (shipped.eos_token, shipped.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_prompts_are_seeded_and_need_only_the_standard_library() -> None:
    assert corpus.prose_prompts(5, 4) == corpus.prose_prompts(5, 4)
    assert len(corpus.tool_prompts(5, 4)) == 4
    code = "import sys; import benchmarks.tiny.corpus; print(int('torch' in sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "0"


def test_the_loss_falls_on_what_the_assistant_says_and_not_on_the_prompt(shipped) -> None:  # type: ignore[no-untyped-def]
    data = pytest.importorskip("benchmarks.tiny.data")
    encoder = data.Encoder(shipped)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
    ids, weights = encoder.encode(corpus.Document("talk", messages=messages))
    said = shipped.decode([i for i, w in zip(ids, weights, strict=True) if w == 1.0])
    prompt = shipped.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert said == "Hello!<|im_end|>"
    assert shipped.decode(ids) == prompt + said + "\n<|endoftext|>"


def test_rows_are_full_and_start_with_a_document(shipped) -> None:  # type: ignore[no-untyped-def]
    data = pytest.importorskip("benchmarks.tiny.data")
    rows = data.rows(data.Encoder(shipped), corpus.documents(0), 384)
    for ids, weights in itertools.islice(rows, 40):
        assert len(ids) == len(weights) == 384
        start = shipped.decode(ids[:3])
        assert start.startswith("<|im_start|>") or "<|" not in start
