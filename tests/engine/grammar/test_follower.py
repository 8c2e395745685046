"""What a mask allows keeps the schema, whatever is drawn, and is a function of the output alone."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import pytest

from engine.errors import RequestError
from engine.grammar.compiler import MAX_WHITESPACE, GrammarCompiler
from engine.grammar.follower import Follower, Utf8Rules, Words, pack_mask
from engine.grammar.schema import check_schema
from engine.grammar.vocabulary import Vocabulary
from engine.sampling.shaping import unpack_mask

END = 2041
Follow = Callable[[Any], Follower]

SCHEMAS: dict[str, Any] = {
    "object": {"type": "object"},
    "anything": {},
    "person": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 2, "maxLength": 9},
            "age": {"type": "integer", "minimum": 3, "maximum": 117},
            "size": {"type": "number", "exclusiveMinimum": 0, "maximum": 2.5},
            "tags": {"type": "array", "items": {"enum": ["a", 'q"', "é"]}, "maxItems": 3},
        },
        "required": ["name", "tags"],
        "additionalProperties": False,
    },
    "length": {"type": "string", "maxLength": 6},
    "nullable": {"type": ["string", "null"], "minLength": 4},
    "pattern": {"type": "string", "pattern": "^[a-c]+-[0-9]{2,3}$"},
    "choice": {"anyOf": [{"type": "integer", "multipleOf": 7}, {"const": {"k": [1, None]}}]},
    "union": {
        "oneOf": [
            {"type": "object", "properties": {"t": {"const": "a"}}, "required": ["t"]},
            {
                "type": "object",
                "properties": {"t": {"const": "b"}, "v": {"type": "boolean"}},
                "required": ["t", "v"],
            },
        ]
    },
    "list": {
        "$defs": {
            "N": {
                "type": "object",
                "properties": {
                    "v": {"type": "integer"},
                    "next": {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]},
                },
                "required": ["v", "next"],
            }
        },
        "$ref": "#/$defs/N",
    },
    "map": {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 3},
    "keys": {"type": "object", "patternProperties": {"^x_[a-z]$": {"type": "integer"}}},
    "names": {"type": "object", "propertyNames": {"maxLength": 3}},
    "open": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "additionalProperties": {"type": "null"},
    },
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "integer"}, {"type": "string", "maxLength": 2}],
        "items": {"type": "null"},
        "minItems": 2,
        "maxItems": 4,
    },
    "date": {"type": "string", "format": "date-time"},
    "single": {"allOf": [{"type": "boolean"}]},
}


@pytest.fixture(scope="module")
def follow(vocabulary: Vocabulary, compiler: GrammarCompiler) -> Follow:
    rules = Utf8Rules(vocabulary)

    def make(schema: Any) -> Follower:
        text = json.dumps(schema, ensure_ascii=False)
        check_schema(text)
        compiled = compiler.compile(compiler.grammar_text(text))
        return Follower(compiled, rules, len(vocabulary.pieces), (END,))

    return make


def ids(mask: Words | None) -> list[int]:
    assert mask is not None
    found: list[int] = np.flatnonzero(unpack_mask(mask, 2048)).tolist()
    return found


def draw(follower: Follower, pieces: tuple[bytes, ...], rng: random.Random, most: int) -> list[int]:
    """Random allowed tokens, those that close something more often, until the end."""
    output: list[int] = []
    while len(output) < most:
        allowed = ids(follower.allowed(output))
        assert allowed, "a mask must never be empty"
        weights = [30 if pieces[i] in (b'"', b"}", b"]", b"") else 1 for i in allowed]
        output += rng.choices(allowed, weights)
        if output[-1] == END:
            break
    return output


@pytest.mark.parametrize("name", SCHEMAS)
def test_whatever_is_drawn_keeps_the_schema(
    name: str, follow: Follow, vocabulary: Vocabulary
) -> None:
    rng = random.Random(name)
    ended = 0
    for _ in range(40):
        output = draw(follow(SCHEMAS[name]), vocabulary.pieces, rng, 250)
        if output[-1] == END:
            ended += 1
            text = b"".join(vocabulary.pieces[i] for i in output).decode("utf-8")
            jsonschema.validate(json.loads(text), SCHEMAS[name])
    assert ended > 15, f"only {ended} of 40 ended"


@pytest.mark.parametrize("name", ["person", "object", "list"])
def test_masks_do_not_depend_on_the_way(name: str, follow: Follow, vocabulary: Vocabulary) -> None:
    """Bursts of drafts go forward and back; a fresh follower says the same of every prefix."""
    rng = random.Random(7)
    output = draw(follow(SCHEMAS[name]), vocabulary.pieces, rng, 40)
    forth_and_back = follow(SCHEMAS[name])
    lengths = [rng.randrange(len(output)) for _ in range(60)]
    for length in lengths:
        fresh = follow(SCHEMAS[name]).allowed(output[:length])
        again = forth_and_back.allowed(output[:length])
        assert fresh is not None
        assert again is not None
        assert (fresh == again).all()
        wrong = [*output[:length], next(i for i in range(2048) if i not in ids(fresh))]
        assert forth_and_back.allowed(wrong) is None
        assert forth_and_back.allowed([*wrong, 5, 6]) is None


def test_only_an_end_follows_the_end(follow: Follow, vocabulary: Vocabulary) -> None:
    follower = follow({"const": 1})
    one = vocabulary.pieces.index(b"1")
    assert ids(follower.allowed([one])) == [END]
    for more in ([END], [END, END], [END, one]):
        assert ids(follower.allowed([one, *more])) == [END]
    assert follower.allowed([END]) is None, "an end before anything was said"
    assert ids(follower.allowed([])) != [END]


def test_white_space_ends(follow: Follow, vocabulary: Vocabulary) -> None:
    follower = follow({"type": "object", "properties": {"a": {}}, "required": ["a"]})
    space = vocabulary.pieces.index(b" ")
    output = [vocabulary.pieces.index(b"{")]
    while space in ids(follower.allowed(output)):
        output.append(space)
    assert len(output) == 1 + MAX_WHITESPACE


def test_added_tokens_and_padding_are_never_allowed(follow: Follow) -> None:
    follower = follow({"type": "string"})
    allowed = ids(follower.allowed(follower_start(follower)))
    assert not set(allowed) & set(range(2039, 2048))


def follower_start(follower: Follower) -> list[int]:
    return [next(i for i in ids(follower.allowed([])) if i < 256)]


def test_a_schema_in_ascii_and_one_in_unicode_are_the_same(
    follow: Follow, vocabulary: Vocabulary
) -> None:
    follower = follow({"const": "é"})
    text = '"é"'.encode()
    output = [vocabulary.pieces.index(bytes([byte])) for byte in text]
    for length in range(len(output)):
        assert output[length] in ids(follower.allowed(output[:length]))
    assert ids(follower.allowed(output)) == [END]


def test_utf8_rules() -> None:
    pieces = (
        b"\xed",
        b"\xed\xa0",
        b"\xed\x9f",
        b"\xa0",
        b"\x9f",
        b"\xf4",
        b"\x90",
        b"\xff",
        b"",
        b"a",
    )
    rules = Utf8Rules(Vocabulary(pieces, (8,)))

    def after(token: int | None) -> set[int]:
        return set(np.flatnonzero(unpack_mask(rules.after(token), len(pieces))).tolist())

    everything = {0, 2, 3, 4, 5, 6, 8, 9}
    assert after(None) == after(9) == after(8) == after(3) == everything
    assert after(0) == {4, 6}
    assert after(5) == set()


def test_masks_are_packed_as_the_sampler_reads_them() -> None:
    allowed = [bool(i % 3) for i in range(70)]
    words = pack_mask(allowed)
    assert (words.dtype, words.size) == (np.int32, 3)
    assert unpack_mask(words, 70).tolist() == allowed


def test_a_grammar_that_takes_too_long_is_given_up(
    follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "thread_time", lambda: now)
    follower = follow({"type": "string"})
    ticks = iter([0.01] * 30 + [0.031] * 40)

    def slow_mask(output: Any) -> None:
        nonlocal now
        now += next(ticks)

    monkeypatch.setattr(follower, "_mask", slow_mask)
    for _ in range(66):
        follower.allowed([])
    with pytest.raises(RequestError, match="too ambiguous to follow: 31 ms for token 67"):
        follower.allowed([])
    follower = follow({"type": "string"})
    ticks = iter([0.11])
    monkeypatch.setattr(follower, "_mask", slow_mask)
    with pytest.raises(RequestError, match="110 ms for token 1"):
        follower.allowed([])
