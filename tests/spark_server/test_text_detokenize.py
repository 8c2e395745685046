"""Incremental detokenization equals a one-shot decode, whatever the ids and the bursts."""

from __future__ import annotations

import random
import time

import pytest

from spark_server.text.tokenizer import Tokenizer
from tests.spark_server.text_fixtures import added_id, fallback_definition, tokenizer_definition

FAMILY = "👩‍👩‍👧‍👦🇯🇵 你好 ñ ع “it’s” 'don’t'"  # noqa: RUF001
DEFINITIONS = {"byte-level": tokenizer_definition, "byte-fallback": fallback_definition}


def stream(tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip: bool) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    pieces, position = [], 0
    for cut in cuts:
        pieces.append(detokenizer.feed(ids[position : position + cut]))
        position += cut
    assert position >= len(ids)
    return [*pieces, detokenizer.finish()]


def shown(tokenizer: Tokenizer, ids: list[int], skip: bool) -> str:
    """One-shot text; markup stays visible for the parsers even where it is called special."""
    return tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", list(DEFINITIONS))
@pytest.mark.parametrize("skip", [True, False])
def test_any_ids_in_any_bursts_give_the_one_shot_text(kind: str, skip: bool) -> None:
    tokenizer = Tokenizer(DEFINITIONS[kind]())
    rng = random.Random(7)
    family = tokenizer.encode(FAMILY)
    for _ in range(2500):
        ids = [rng.randrange(tokenizer.vocab_size + 3) for _ in range(rng.randrange(12))]
        ids += family[: rng.randrange(len(family))]
        cuts = [rng.randint(1, 5) for _ in ids]
        pieces = stream(tokenizer, ids, cuts, skip)
        assert "".join(pieces) == shown(tokenizer, ids, skip), ids


def test_no_half_character_is_ever_sent() -> None:
    tokenizer = Tokenizer(tokenizer_definition())
    ids = tokenizer.encode(FAMILY)
    pieces = stream(tokenizer, ids, [1] * len(ids), True)
    assert "".join(pieces) == FAMILY
    assert not any("\ufffd" in piece for piece in pieces)
    cut = stream(tokenizer, ids[:3], [1] * 3, True)
    assert cut[:-1] == ["", "", ""]
    assert cut[-1] == tokenizer.decode(ids[:3]) == "\ufffd"


def test_invalid_bytes_do_not_stall_the_stream() -> None:
    tokenizer = Tokenizer(tokenizer_definition())
    lone = tokenizer.encode("好")[1]
    pieces = stream(tokenizer, [lone, *tokenizer.encode("abc")], [1] * 4, True)
    assert pieces == ["\ufffd", "a", "b", "c", ""]


def test_special_tokens_are_hidden_or_shown_but_markup_is_always_shown() -> None:
    definition = tokenizer_definition().replace(
        '"content": "<think>", "single_word": false, "lstrip": false, "rstrip": false, '
        '"normalized": false, "special": false',
        '"content": "<think>", "single_word": false, "lstrip": false, "rstrip": false, '
        '"normalized": false, "special": true',
    )
    assert definition != tokenizer_definition()
    tokenizer = Tokenizer(definition)
    ids = [added_id("<|im_end|>"), added_id("<think>"), 65]
    assert "".join(stream(tokenizer, ids, [3], True)).startswith("<think>")
    assert "".join(stream(tokenizer, ids, [3], False)).startswith("<|im_end|><think>")


def test_a_token_costs_little() -> None:
    # 2,500 tokens a second leave 400 us for everything; text may take 25 of them.
    tokenizer = Tokenizer(tokenizer_definition())
    ids = tokenizer.encode("the quick brown fox " * 500)
    best = float("inf")
    for _ in range(3):
        detokenizer = tokenizer.detokenizer()
        began = time.perf_counter()
        for token_id in ids:
            detokenizer.feed((token_id,))
        best = min(best, (time.perf_counter() - began) / len(ids))
    assert best < 25e-6
