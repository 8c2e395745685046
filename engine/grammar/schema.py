"""Which JSON schemas are taken as a grammar: bounded ones, of keywords that are followed exactly.

Plain checks of text, so that a refusal costs no compilation; knows neither tokens nor xgrammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from engine.errors import RequestError

MAX_BYTES = 64 * 1024
MAX_DEPTH = 32  # subschemas inside one another
MAX_ENUM = 2000
MAX_PATTERN = 512
MAX_COUNT = 10_000  # items, properties, characters
# Characters of a pattern when its counted repetitions are written out: so many places at once a
# match may be at, and each costs time at every token.
MAX_PLACES = 1000
MAX_PATTERN_DEPTH = 16
MAX_NUMBER = 2**53

# Keywords without a grammar, or that xgrammar 0.2.9 drops without a word.
_UNSUPPORTED = frozenset(
    {
        "not",
        "if",
        "then",
        "else",
        "contains",
        "minContains",
        "maxContains",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "unevaluatedItems",
        "unevaluatedProperties",
        "$dynamicRef",
        "$recursiveRef",
    }
)
_COUNTS = frozenset(
    {"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"}
)
_OF_STRINGS = frozenset({"minLength", "maxLength", "pattern"})
_OF_NUMBERS = frozenset(
    {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
)
_OF_ARRAYS = frozenset({"items", "prefixItems", "minItems", "maxItems"})
_OF_OBJECTS = frozenset(
    {
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
    }
)
_CHOICES = ("anyOf", "oneOf", "allOf")
_ASSERTIONS = (
    _OF_STRINGS
    | _OF_NUMBERS
    | _OF_ARRAYS
    | _OF_OBJECTS
    | frozenset({"type", "enum", "const", "$ref", "format", *_CHOICES})
)
_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}
# An escape, a class, a counted repetition, or any one character.
_PATTERN_TOKEN = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(?P<low>\d+)(?:,(?P<high>\d*))?\}|.", re.DOTALL
)


def check_schema(text: str, param: str = "response_format") -> None:
    """Check that a JSON schema text can be followed, within bounds.

    Args:
        param: the request field that an error blames.

    Raises:
        RequestError: it is no schema, too large, or uses what the output could not keep to.
    """
    _Check(param).document(text)


class _Check:
    """One walk over a schema; stops at the first thing that is wrong."""

    def __init__(self, param: str) -> None:
        self._param = param

    def refuse(self, message: str) -> NoReturn:
        raise RequestError(
            f"{self._param}: the JSON schema {message}", param=self._param, code="invalid_schema"
        )

    def document(self, text: str) -> None:
        size = len(text.encode("utf-8", "surrogatepass"))
        if size > MAX_BYTES:
            self.refuse(f"has {size} bytes, at most {MAX_BYTES} are accepted")
        try:
            root = json.loads(text, parse_constant=self._no_constant)
        except RecursionError:
            self.refuse(f"is nested deeper than {MAX_DEPTH} schemas")
        except ValueError as error:
            self.refuse(f"is not valid JSON: {error}")
        self.schema(root, 0)

    def schema(self, node: object, depth: int) -> None:
        if isinstance(node, bool):
            return
        if not isinstance(node, dict):
            self.refuse(f"has {_short(node)} where a schema must be")
        if depth > MAX_DEPTH:
            self.refuse(f"is nested deeper than {MAX_DEPTH} schemas")
        for keyword in node:
            if keyword in _UNSUPPORTED:
                self.refuse(f"uses {keyword}, which is not supported; leave it out")
        if node.get("uniqueItems") is True:
            self.refuse("uses uniqueItems, which is not supported; leave it out")
        for keyword in _COUNTS & node.keys():
            self._count(keyword, node[keyword])
        for keyword in _OF_NUMBERS & node.keys():
            self._number(keyword, node[keyword])
        if "pattern" in node:
            self._pattern(node["pattern"])
        self._exclusive(node)
        self._types(node)
        self._object(node)
        for child in self._children(node):
            self.schema(child, depth + 1)

    def _no_constant(self, name: str) -> NoReturn:
        self.refuse(f"holds {name}, which is not JSON")

    def _count(self, keyword: str, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
            self.refuse(f"has {keyword} {_short(value)}, it must be an integer 0 to {MAX_COUNT}")

    def _number(self, keyword: str, value: object) -> None:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not abs(value) <= MAX_NUMBER:  # type: ignore[arg-type]
            self.refuse(f"has {keyword} {_short(value)}, it must be a number within ±2^53")

    def _pattern(self, pattern: object) -> None:
        if not isinstance(pattern, str):
            self.refuse(f"has the pattern {_short(pattern)}, it must be a string")
        if len(pattern) > MAX_PATTERN:
            self.refuse(
                f"has a pattern of {len(pattern)} characters, at most {MAX_PATTERN} are accepted"
            )
        places, deepest = pattern_size(pattern)
        if places > MAX_PLACES:
            self.refuse(
                f"has a pattern of {places} characters when its repetitions are written out, at "
                f"most {MAX_PLACES} are accepted"
            )
        if deepest > MAX_PATTERN_DEPTH:
            self.refuse(
                f"has a pattern with {deepest} nested groups, at most {MAX_PATTERN_DEPTH} are "
                "accepted"
            )

    def _exclusive(self, node: dict[str, Any]) -> None:
        """xgrammar looks at one of these and at nothing beside it."""
        for keyword in ("$ref", "const", "enum", *_CHOICES):
            if keyword not in node:
                continue
            beside = (_ASSERTIONS & node.keys()) - {keyword}
            if keyword in ("const", "enum"):
                beside -= {"type"}
                self._values(node, keyword)
            if beside:
                self.refuse(
                    f"has {', '.join(sorted(beside))} beside {keyword}, which is not supported; "
                    "put everything into one place"
                )
        reference = node.get("$ref")
        if reference is not None and not (
            isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))
        ):
            self.refuse(f"has the $ref {_short(reference)}; only '#' and '#/...' are supported")
        if len(node.get("allOf", ())) > 1:
            self.refuse("has an allOf of several schemas, which is not supported; merge them")

    def _values(self, node: dict[str, Any], keyword: str) -> None:
        values = node[keyword] if keyword == "enum" else [node[keyword]]
        if not isinstance(values, list) or not values:
            self.refuse("has an enum that is no list of values")
        if len(values) > MAX_ENUM:
            self.refuse(f"has an enum of {len(values)} values, at most {MAX_ENUM} are accepted")
        wanted = self._type_names(node)
        for value in values:
            if wanted and not any(_is_of(value, name) for name in wanted):
                self.refuse(f"has {keyword} {_short(value)}, which is not of type {wanted}")

    def _type_names(self, node: dict[str, Any]) -> list[str]:
        declared = node.get("type", [])
        names = declared if isinstance(declared, list) else [declared]
        for name in names:
            if not isinstance(name, str) or name not in _TYPES:
                self.refuse(f"has the unknown type {_short(name)}")
        return names

    def _types(self, node: dict[str, Any]) -> None:
        """A keyword of one type counts only beside that type, or the grammar would drop it."""
        names = self._type_names(node)
        for keywords, of in (
            (_OF_STRINGS, {"string"}),
            (_OF_NUMBERS, {"integer", "number"}),
            (_OF_ARRAYS, {"array"}),
            (_OF_OBJECTS, {"object"}),
        ):
            found = keywords & node.keys()
            if found and names and not of & set(names):
                self.refuse(f"has {min(found)} beside the type {names}")
            if found and not names and found <= _OF_STRINGS | _OF_NUMBERS | _COUNTS:
                self.refuse(f"has {min(found)} without a type; add the type")
        if len(names) == 0 and _OF_OBJECTS & node.keys() and _OF_ARRAYS & node.keys():
            self.refuse("has keywords of objects and arrays without a type; add the type")
        if "pattern" in node and {"minLength", "maxLength", "format"} & node.keys():
            self.refuse("has a pattern beside minLength, maxLength or format; use the pattern only")

    def _object(self, node: dict[str, Any]) -> None:
        properties = node.get("properties", {})
        if not isinstance(properties, dict):
            self.refuse("has properties that are no object")
        required = node.get("required", [])
        if not isinstance(required, list):
            self.refuse("has a required that is no list")
        for name in required:
            if name not in properties:
                self.refuse(f"requires {_short(name)}, which is not among its properties")
        if isinstance(node.get("items"), list):
            self.refuse("has a list as items; use prefixItems")
        more = node.get("additionalProperties", not properties) is not False
        open_keys = "patternProperties" in node or "propertyNames" in node or more
        if node.get("minProperties", 0) > 1 and open_keys:
            # A model may write one key twice, and nobody counts different ones.
            self.refuse("has minProperties above 1 with free keys, which is not supported")
        if properties and ("patternProperties" in node or "propertyNames" in node):
            self.refuse("has properties beside patternProperties or propertyNames; use one of them")

    def _children(self, node: dict[str, Any]) -> list[object]:
        children: list[object] = []
        for keyword in ("properties", "patternProperties", "$defs", "definitions"):
            named = node.get(keyword, {})
            if not isinstance(named, dict):
                self.refuse(f"has {keyword} that are no object")
            children.extend(named.values())
            if keyword == "patternProperties":
                for pattern in named:
                    self._pattern(pattern)
        for keyword in (*_CHOICES, "prefixItems"):
            listed = node.get(keyword, [])
            if not isinstance(listed, list):
                self.refuse(f"has {keyword} that is no list of schemas")
            children.extend(listed)
        children.extend(
            node[keyword] for keyword in ("items", "additionalProperties") if keyword in node
        )
        names = node.get("propertyNames", True)
        children.append({"type": "string", **names} if isinstance(names, dict) else names)
        return children


def pattern_size(pattern: str) -> tuple[int, int]:
    """Characters of a regular expression with counted repetitions written out, and its depth.

    Expects no valid expression; what it cannot read it takes for characters.
    """
    sizes, lasts = [0], [0]  # per open group: its size, and the size of its last part
    deepest = 0
    for token in _PATTERN_TOKEN.finditer(pattern):
        text = token[0]
        if text == "(":
            sizes.append(0)
            lasts.append(0)
            deepest = max(deepest, len(sizes) - 1)
        elif text == ")" and len(sizes) > 1:
            lasts.pop()
            lasts[-1] = sizes.pop()
            sizes[-1] += lasts[-1]
        elif token["low"]:
            more = lasts[-1] * (max(int(token["low"]), int(token["high"] or 0), 1) - 1)
            lasts[-1] += more
            sizes[-1] += more
        elif text not in "|^$*+?":
            lasts[-1] = 1
            sizes[-1] += 1
    return sum(sizes), deepest


def _is_of(value: object, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[name])


def _short(value: object) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= 60 else text[:57] + "..."
