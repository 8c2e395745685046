"""Which schemas are taken: bounded ones, and only keywords that the output keeps to."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.errors import RequestError
from engine.grammar.schema import MAX_BYTES, MAX_DEPTH, check_schema, pattern_size


def refusal(schema: Any, **options: Any) -> RequestError:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    with pytest.raises(RequestError) as caught:
        check_schema(text, **options)
    assert caught.value.status == 400
    assert caught.value.code == "invalid_schema"
    return caught.value


def objects(depth: int) -> dict[str, Any]:
    node: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        node = {"type": "object", "properties": {"a": node}}
    return node


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "object"},
        {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
        {"type": ["string", "null"], "maxLength": 3},
        {"type": "string", "nullable": True, "x-order": 5, "format": "date"},
        {"$defs": {"A": {"type": "null"}}, "title": "t", "$ref": "#/$defs/A"},
        {"anyOf": [{"type": "integer", "minimum": -5}, {"const": "a"}], "description": "d"},
        {"type": "number", "enum": [1, 2.5]},
        {"type": "array", "prefixItems": [{"const": 1}], "items": False, "uniqueItems": False},
        {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1},
        {"type": "string", "pattern": "^(a|b){2,100}$"},
        {"enum": [True, None, {"not": 1}]},
        {"type": "object", "properties": {"not": {"type": "string"}, "if": {}}},
        objects(MAX_DEPTH),
    ],
)
def test_schemas_that_can_be_kept(schema: Any) -> None:
    check_schema(json.dumps(schema))


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ("{", "is not valid JSON"),
        ('{"minimum": NaN, "type": "number"}', "holds NaN"),
        ("[" * 100_000, f"bytes, at most {MAX_BYTES}"),
        ("[" * 60_000, "nested deeper"),
        ("5", "has 5 where a schema must be"),
        ([{}], "where a schema must be"),
        (objects(MAX_DEPTH + 1), f"nested deeper than {MAX_DEPTH} schemas"),
        ({"not": {}}, "uses not"),
        ({"type": "array", "items": {"if": {}}}, "uses if"),
        ({"type": "array", "uniqueItems": True}, "uses uniqueItems"),
        ({"type": "array", "maxItems": 2**64 - 1}, "maxItems 18446744073709551615"),
        ({"type": "array", "minItems": -1}, "minItems -1"),
        ({"type": "array", "minItems": True}, "minItems true"),
        ({"type": "string", "maxLength": 1.5}, "maxLength 1.5"),
        ({"type": "integer", "minimum": 1e300}, "minimum 1e+300"),
        ({"type": "integer", "minimum": "3"}, 'minimum "3"'),
        ({"type": "string", "pattern": 5}, "the pattern 5"),
        ({"type": "string", "pattern": "a" * 513}, "a pattern of 513 characters"),
        ({"type": "string", "pattern": "a{1000000000}"}, "a pattern of 1000000000 characters"),
        ({"type": "string", "pattern": "(a{200}){0,200}"}, "a pattern of 40000 characters"),
        ({"type": "string", "pattern": "(" * 17}, "17 nested groups"),
        (
            {"patternProperties": {"a{99999}": {}}, "type": "object"},
            "a pattern of 99999 characters",
        ),
        ({"type": "string", "pattern": "^a$", "maxLength": 3}, "a pattern beside"),
        ({"enum": []}, "no list of values"),
        ({"enum": "ab"}, "no list of values"),
        ({"enum": list(range(2001))}, "an enum of 2001 values"),
        ({"enum": ["a", 3], "type": "string"}, "has enum 3, which is not of type"),
        ({"const": True, "type": "integer"}, "has const true"),
        ({"const": 1, "minimum": 5, "type": "integer"}, "has minimum beside const"),
        ({"anyOf": [{}], "type": "object"}, "has type beside anyOf"),
        ({"$ref": "#", "minimum": 3}, "beside $ref"),
        ({"$ref": "http://x/y"}, "the $ref"),
        ({"$ref": 5}, "the $ref 5"),
        ({"allOf": [{}, {}]}, "an allOf of several schemas"),
        ({"anyOf": {}}, "anyOf that is no list"),
        ({"type": "zzz"}, "the unknown type"),
        ({"type": [["string"]]}, "the unknown type"),
        ({"maxLength": 3}, "maxLength without a type"),
        ({"type": "integer", "pattern": "a"}, "pattern beside the type"),
        ({"properties": {}, "items": {}}, "objects and arrays"),
        ({"type": "object", "properties": []}, "properties that are no object"),
        ({"type": "object", "required": ["a"]}, 'requires "a"'),
        ({"type": "object", "required": "a"}, "required that is no list"),
        ({"type": "array", "items": [{}]}, "use prefixItems"),
        ({"type": "object", "minProperties": 2}, "minProperties above 1"),
        ({"$defs": []}, "$defs that are no object"),
        ({"type": "object", "properties": {"a": 5}}, "has 5 where a schema must be"),
        (
            {"type": "object", "properties": {"a": {}}, "patternProperties": {"b": {}}},
            "properties beside patternProperties",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused_in_words(schema: Any, words: str) -> None:
    error = refusal(schema)
    assert words in error.message
    assert error.message.startswith("response_format: the JSON schema ")
    assert error.param == "response_format"
    assert len(error.message) < 300


def test_an_error_blames_the_field_that_was_given() -> None:
    assert refusal({"not": {}}, param="tools").param == "tools"


def test_lone_surrogates_are_counted_not_fatal() -> None:
    check_schema('{"const": "\ud800"}')


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        ("", (0, 0)),
        ("^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{12}$", (26, 0)),
        ("(ab|c){3,}d*", (10, 1)),
        (r"\(\){5}[()\]{9}]{2}", (8, 0)),
        ("((a{2}){3}){4}b", (25, 2)),
        ("(" * 9, (0, 9)),
        (")))a{0}{", (5, 0)),
        ("[]a]{7}[^]]", (8, 0)),
    ],
)
def test_the_size_of_a_pattern(pattern: str, size: tuple[int, int]) -> None:
    assert pattern_size(pattern) == size
