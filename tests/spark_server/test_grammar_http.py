"""Constrained output of the packaged model through a real server: always what was asked for."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

import spark_server

pytestmark = pytest.mark.server
REPO = Path(spark_server.__file__).parent.parent
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mood": {"enum": ["good", "bad"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "mood", "tags"],
    "additionalProperties": False,
}
# Ends quickly whatever the model likes: each of these is wanted where the grammar allows it.
CLOSERS = {"temperature": 1.5, "seed": 3}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SPARK_")}
    command = [sys.executable, "-m", "spark_server.cli", "serve", "--port", "0", "--device", "cpu"]
    with subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPO,
        env=environ | {"PYTHONWARNINGS": "error"},
    ) as process:
        lines: list[str] = []
        assert process.stderr is not None
        reader = threading.Thread(target=lambda: lines.extend(process.stderr or ()))
        reader.start()
        try:
            end = time.monotonic() + 50
            while not (found := re.search(r"on (http://\S+) after", "".join(lines))):
                assert process.poll() is None, "".join(lines)
                assert time.monotonic() < end, "".join(lines)
                time.sleep(0.05)
            yield found[1]
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()
            process.wait()
            reader.join(10)
    text = "".join(lines)
    assert "Traceback" not in text, text
    assert "Warning" not in text, text


def chat(url: str, **body: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "Tell me about Ruby the fox"}]
    return httpx.post(
        url + "/v1/chat/completions",
        json={"messages": messages, "max_tokens": 200, **body},
        timeout=50,
    )


def streamed(url: str, **body: Any) -> list[dict[str, Any]]:
    """The joined deltas of each choice of a stream."""
    response = chat(url, stream=True, **body)
    assert response.status_code == 200, response.text
    choices: dict[int, dict[str, Any]] = {}
    for line in response.text.splitlines():
        if not line.startswith("data: {"):
            continue
        for part in json.loads(line[6:])["choices"]:
            choice = choices.setdefault(part["index"], {"content": "", "calls": [], "finish": None})
            delta = part["delta"]
            choice["content"] += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                if "id" in call:
                    choice["calls"].append({"name": call["function"]["name"], "arguments": ""})
                choice["calls"][-1]["arguments"] += call["function"].get("arguments") or ""
            choice["finish"] = part["finish_reason"] or choice["finish"]
    return [choices[index] for index in sorted(choices)]


def whole(url: str, **body: Any) -> list[dict[str, Any]]:
    """The same of an answer that is not streamed."""
    response = chat(url, **body)
    assert response.status_code == 200, response.text
    return [
        {
            "content": choice["message"]["content"] or "",
            "calls": [
                {k: call["function"][k] for k in ("name", "arguments")}
                for call in choice["message"].get("tool_calls") or ()
            ],
            "finish": choice["finish_reason"],
        }
        for choice in response.json()["choices"]
    ]


def both(url: str, **body: Any) -> list[dict[str, Any]]:
    choices = whole(url, **body)
    assert streamed(url, **body) == choices
    return choices


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def test_a_schema_is_kept_in_every_choice(url: str) -> None:
    choices = both(url, response_format=schema_format(PERSON), n=3, **CLOSERS)
    assert len(choices) == 3
    for choice in choices:
        jsonschema.validate(json.loads(choice["content"]), PERSON)
        assert choice["finish"] == "stop"
    assert len({choice["content"] for choice in choices}) > 1
    greedy = both(url, response_format=schema_format(PERSON), temperature=0)
    jsonschema.validate(json.loads(greedy[0]["content"]), PERSON)
    response = httpx.post(
        url + "/v1/completions",
        json={"prompt": "Ruby", "max_tokens": 200, "response_format": schema_format(PERSON)},
        timeout=50,
    )
    jsonschema.validate(json.loads(response.json()["choices"][0]["text"]), PERSON)


def test_json_object(url: str) -> None:
    for seed in range(6):
        (choice,) = whole(
            url, response_format={"type": "json_object"}, seed=seed, temperature=1.0, max_tokens=400
        )
        assert choice["content"].lstrip().startswith("{")
        if choice["finish"] == "stop":
            assert isinstance(json.loads(choice["content"]), dict)
            return
    raise AssertionError("no object ended within 400 tokens")


TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "add_person", "parameters": PERSON}},
    {
        "type": "function",
        "function": {
            "name": "pick",
            "parameters": {
                "$defs": {"Side": {"enum": ["left", "right"]}},
                "type": "object",
                "properties": {"side": {"$ref": "#/$defs/Side"}},
                "required": ["side"],
            },
        },
    },
    {"type": "function", "function": {"name": "nothing"}},
]
SCHEMAS = {t["function"]["name"]: t["function"].get("parameters", {}) for t in TOOLS}


def test_a_named_tool_is_called(url: str) -> None:
    for name in SCHEMAS:
        choice = {"type": "function", "function": {"name": name}}
        (answer,) = both(url, tools=TOOLS, tool_choice=choice, **CLOSERS)
        assert answer["content"] == ""
        assert [call["name"] for call in answer["calls"]] == [name]
        jsonschema.validate(json.loads(answer["calls"][0]["arguments"]), SCHEMAS[name])


def test_required_calls_some_tool(url: str) -> None:
    answers = both(
        url, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, n=4, **CLOSERS
    )
    for answer in answers:
        assert answer["content"] == ""
        assert answer["finish"] == "tool_calls"
        assert len(answer["calls"]) == 1
        call = answer["calls"][0]
        jsonschema.validate(json.loads(call["arguments"]), SCHEMAS[call["name"]])


def nested_one_of(depth: int) -> dict[str, Any]:
    node: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        node = {"oneOf": [node, {"type": "array", "items": node}]}
    return node


SLOW = {"type": "string", "pattern": "^(.{0,30},?){30}$"}  # would compile for minutes
# Compiles at once and takes more time with every token, which nobody sees beforehand.
AMBIGUOUS = {"type": "string", "pattern": "^.*a.{900}$"}


def deep(depth: int) -> dict[str, Any]:
    node: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        node = {"type": "object", "properties": {"a": node}}
    return node


HOSTILE: dict[str, Any] = {
    "oneOf": nested_one_of(12),
    "deep": deep(400),
    "self": {"$ref": "#/$defs/N", "$defs": {"N": {"$ref": "#/$defs/N"}}},
    "maxItems": {"type": "array", "maxItems": 2**64 - 1},
    "minItems": {"type": "array", "minItems": 2**64 - 1},
    "maxLength": {"type": "string", "maxLength": 2**64 - 1},
    "groups": {"type": "string", "pattern": "(" * 2000},
    "repeats": {"type": "string", "pattern": "a{1000000000}"},
    "lookbehind": {"type": "string", "pattern": "(?<=x)*"},
    "star": {"type": "string", "pattern": "*"},
    "enum": {"enum": [f"s{i}" for i in range(100_000)]},
    "not": {"not": {"type": "string"}},
    "reference": {"$ref": "#/$defs/nobody"},
}


@contextlib.contextmanager
def plain_stream(url: str) -> Iterator[list[float]]:
    """A long plain stream beside; gives the seconds between its events."""
    gaps: list[float] = []
    end = threading.Event()

    def read() -> None:
        body = {
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 3500,
            "ignore_eos": True,
            "logprobs": True,  # an event for every token, also for those without text
            "stream": True,
        }
        while not end.is_set():
            with httpx.stream("POST", url + "/v1/chat/completions", json=body, timeout=50) as got:
                last = time.monotonic()
                for _ in got.iter_raw():
                    now = time.monotonic()
                    gaps.append(now - last)
                    last = now
                    if end.is_set():
                        return

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield gaps
    finally:
        end.set()
        thread.join(50)
    assert len(gaps) > 20


@pytest.mark.parametrize("stream", [True, False])
def test_hostile_schemas_are_refused_beside_a_stream_that_flows(url: str, stream: bool) -> None:
    """C30: every one is a quick 400, alone and 20 times at once, and nobody else notices."""
    with plain_stream(url) as gaps, ThreadPoolExecutor(20) as pool:
        for name, schema in HOSTILE.items():
            began = time.monotonic()
            response = chat(url, response_format=schema_format(schema), stream=stream)
            assert response.status_code == 400, (name, response.text)
            error = response.json()["error"]
            assert error["param"] == "response_format", (name, error)
            assert error["type"] == "invalid_request_error"
            assert time.monotonic() - began < 8, name
        good = schema_format({"enum": ["once", "for", "all"]})
        for schema in (good, schema_format(HOSTILE["reference"])):
            answers = list(pool.map(lambda _, s=schema: chat(url, response_format=s), range(20)))
            assert {a.status_code for a in answers} == {200 if schema is good else 400}
    assert max(gaps) < 2.0, sorted(gaps)[-5:]


def test_a_schema_that_compiles_for_long_is_given_up(url: str) -> None:
    """Its own client waits for the limit, another's grammar after it, a plain stream not at all."""
    const = schema_format({"const": [1, "x"]})
    with plain_stream(url) as gaps, ThreadPoolExecutor(2) as pool:
        long = pool.submit(chat, url, response_format=schema_format(SLOW))
        time.sleep(0.2)
        (choice,) = whole(url, response_format=const)
        response = long.result()
    assert response.status_code == 400, response.text
    assert "takes longer than 2 s to compile" in response.json()["error"]["message"]
    assert json.loads(choice["content"]) == [1, "x"]
    assert max(gaps) < 2.0, sorted(gaps)[-5:]
    began = time.monotonic()
    assert chat(url, response_format=schema_format(SLOW)).status_code == 400
    assert time.monotonic() - began < 1, "a refusal is remembered"


def test_an_ambiguous_grammar_ends_its_own_request(url: str) -> None:
    with plain_stream(url) as gaps:
        response = chat(
            url,
            response_format=schema_format(AMBIGUOUS),
            logit_bias={"64": 100},
            max_tokens=900,
        )
    assert response.status_code == 400, response.text
    assert "too ambiguous to follow" in response.json()["error"]["message"]
    assert max(gaps) < 2.0, sorted(gaps)[-5:]


def test_a_tools_schema_is_refused_by_name(url: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": HOSTILE["not"]}}]
    response = chat(url, tools=tools, tool_choice="required")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"
    assert chat(url, tools=tools, max_tokens=4).status_code == 200
