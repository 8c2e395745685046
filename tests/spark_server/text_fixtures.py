"""A small byte-level tokenizer and chat templates, built here so that no checkpoint is needed."""

from __future__ import annotations

import json
from typing import Any

from spark_server.text.model import SamplingDefaults, TextModel, build_text_model
from spark_server.text.tokenizer import Tokenizer

ADDED = (
    ("<|endoftext|>", True),
    ("<|im_start|>", True),
    ("<|im_end|>", True),
    ("<tool_call>", False),
    ("</tool_call>", False),
    ("<think>", False),
    ("</think>", False),
)

XML_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\\n</tools> <function=name>' }}
    {%- if messages[0].role == 'system' %}
        {{- '\\n\\n' + messages[0].content }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}{{ raise_exception('System message must be first.') }}{% endif %}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for key, value in call.function.arguments | items %}
                {{- '<parameter=' + key + '>\\n' + (value if value is string else value | tojson) }}
                {{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is true %}
    {{- '<think>\\n' }}
{%- else %}
    {{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
"""

HERMES_TEMPLATE = """\
{%- if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' }}
"""


def byte_alphabet() -> list[str]:
    """The 256 characters in which byte-level BPE writes bytes, by byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def tokenizer_definition() -> str:
    """A `tokenizer.json` with one token per byte, a few merges, and the added tokens above."""
    alphabet = byte_alphabet()
    vocabulary = {char: number for number, char in enumerate(alphabet)}
    merges = []
    space = alphabet[0x20]
    for left, right in (
        ("t", "h"),
        ("th", "e"),
        (space, "a"),
        ("<", "|"),
        ("i", "n"),
        ("\u00e4", "\u00bd"),
    ):
        merges.append([left, right])
        vocabulary[left + right] = len(vocabulary)
    added = []
    for text, special in ADDED:
        entry: dict[str, Any] = {"id": len(vocabulary) + len(added), "content": text}
        for flag in ("single_word", "lstrip", "rstrip", "normalized"):
            entry[flag] = False
        entry["special"] = special
        added.append(entry)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": {**byte_level, "use_regex": True},
            "post_processor": None,
            "decoder": {**byte_level, "use_regex": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": vocabulary,
                "merges": merges,
            },
        }
    )


def fallback_definition() -> str:
    """A `tokenizer.json` of the other kind: word pieces with a leading space, and byte tokens."""
    vocabulary = {
        "<unk>": 0,
        "\u2581": 1,
        "\u2581hello": 2,
        "\u2581world": 3,
        "ing": 4,
        "a": 5,
        "\u00e9": 6,
    }
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    end = {"id": len(vocabulary), "content": "</s>", "special": True}
    for flag in ("single_word", "lstrip", "rstrip", "normalized"):
        end[flag] = False
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [end],
            "normalizer": None,
            "pre_tokenizer": None,
            "post_processor": None,
            "decoder": {
                "type": "Sequence",
                "decoders": [
                    {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                    {"type": "ByteFallback"},
                    {"type": "Fuse"},
                    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
                ],
            },
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": "<unk>",
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": True,
                "byte_fallback": True,
                "ignore_merges": False,
                "vocab": vocabulary,
                "merges": [],
            },
        }
    )


def text_model(template: str = XML_TEMPLATE) -> TextModel:
    """Tokenizer and template together, greedy nowhere by default."""
    tokenizer = Tokenizer(tokenizer_definition())
    return build_text_model(tokenizer, template, {"eos_token": "<|im_end|>"}, SamplingDefaults())


def added_id(text: str) -> int:
    """Id of an added token of the small tokenizer."""
    entries = json.loads(tokenizer_definition())["added_tokens"]
    return next(int(entry["id"]) for entry in entries if entry["content"] == text)
