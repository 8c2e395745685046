"""The API on a real port: the openai client's view, clients that leave, slow templates, imports."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from engine.errors import QueueFullError
from spark_server.api import ApiOptions
from spark_server.engine_api import Endpoint, Outcome
from tests.processes import run_python
from tests.spark_server.api_harness import Api, make_api, serving, wait_for
from tests.spark_server.fake_engine import Script
from tests.spark_server.text_fixtures import text_model

F: Any = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = "<tool_call>\n<function=f>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
USER: Any = [{"role": "user", "content": "hi"}]

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Api, str]]:
    api = make_api(options=ApiOptions(api_keys=("secret",)))
    with serving(api.app) as url:
        yield api, url


@pytest.fixture
def api(served: tuple[Api, str]) -> Api:
    served[0].say("Hello 你好")
    return served[0]


@pytest.fixture
def client(served: tuple[Api, str]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served[1]}/v1", api_key="secret", max_retries=0) as client:
        yield client


def test_the_openai_client_gets_answers(api: Api, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    chat = client.chat.completions.create(model="tiny", messages=USER, logprobs=True)
    assert chat.choices[0].message.content == "Hello 你好"
    assert chat.choices[0].finish_reason == "stop"
    assert chat.usage is not None
    assert chat.choices[0].logprobs is not None
    assert len(chat.choices[0].logprobs.content or []) == chat.usage.completion_tokens
    text = client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=5, n=2)
    assert [choice.text for choice in text.choices] == ["Hello"] * 4


def test_the_openai_client_streams(api: Api, client: openai.OpenAI) -> None:
    with client.chat.completions.create(
        model="tiny", messages=USER, stream=True, n=2, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    texts = ["", ""]
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == ["Hello 你好"] * 2
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    with client.chat.completions.stream(model="tiny", messages=USER) as events:
        final = events.get_final_completion()
    assert final.choices[0].message.content == "Hello 你好"


def test_the_openai_client_gets_tool_calls(api: Api, client: openai.OpenAI) -> None:
    api.say(CALL, burst=2)
    whole = client.chat.completions.create(model="tiny", messages=USER, tools=[F])
    (call,) = whole.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    with client.chat.completions.stream(model="tiny", messages=USER, tools=[F]) as events:
        final = events.get_final_completion()
    (streamed,) = final.choices[0].message.tool_calls or []
    assert streamed.function.name == "f"
    assert json.loads(streamed.function.arguments) == {"city": "Paris"}
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason == "tool_calls"
    # The second turn of a tool loop takes the client's own objects back.
    message: Any = whole.choices[0].message
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "18C"}
    api.say("It is 18C")
    second = client.chat.completions.create(
        model="tiny", messages=[*USER, message, result], tools=[F]
    )
    assert second.choices[0].message.content == "It is 18C"


def test_the_openai_client_raises_its_own_errors(
    api: Api, client: openai.OpenAI, served: tuple[Api, str]
) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nope", messages=USER)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny", prompt="x" * 600, stream=True)
    assert long.value.code == "context_length_exceeded"
    api.engine.script = lambda r: Script(refuse=QueueFullError("full"))
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model="tiny", messages=USER, stream=True)
    api.say("abcdef", fail_after=2)
    with (
        pytest.raises(openai.APIError, match="the engine process ended"),
        client.chat.completions.create(model="tiny", messages=USER, stream=True) as stream,
    ):
        list(stream)
    with (
        openai.OpenAI(base_url=f"{served[1]}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def connection(url: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)


def post(connection: http.client.HTTPConnection, path: str, body: object, **headers: str) -> None:
    connection.request(
        "POST", path, json.dumps(body), {"Authorization": "Bearer secret", **headers}
    )


@pytest.mark.parametrize("fields", [{"stream": True}, {"stream": True, "n": 3}, {}, {"n": 3}])
@pytest.mark.parametrize("state", ["running", "queued"])
def test_a_client_that_leaves_ends_its_sequences(
    api: Api, served: tuple[Api, str], fields: dict[str, Any], state: str
) -> None:
    if state == "running":
        api.say("", fill=65, delay=0.01)
    else:
        api.say("", fill=65, first_delay=30.0)
    choices = fields.get("n", 1)
    before = len(api.engine.aborted)
    outcomes = len(api.observer.outcomes)
    client = connection(served[1])
    post(client, Endpoint.CHAT, {"messages": USER, "ignore_eos": True, **fields})
    wait_for(lambda: api.engine.running == choices)
    if state == "running" and fields.get("stream"):
        assert client.getresponse().read(600)
    elif state == "running":
        time.sleep(0.05)
    assert client.sock is not None
    client.sock.shutdown(socket.SHUT_RDWR)
    client.close()
    left = time.monotonic()
    wait_for(lambda: api.engine.running == 0)
    assert time.monotonic() - left < 1
    wait_for(lambda: len(api.observer.outcomes) == outcomes + choices)
    assert len(api.engine.aborted) == before + choices
    assert api.observer.outcomes[outcomes:] == [Outcome.ABORT] * choices
    assert api.observer.open == set()


def test_a_client_that_leaves_does_not_disturb_its_twin(api: Api, served: tuple[Api, str]) -> None:
    api.say("abcdefghij" * 3, delay=0.01)
    first, second = connection(served[1]), connection(served[1])
    headers = {"X-Request-Id": "dup"}
    body = {"messages": USER, "stream": True}
    post(first, Endpoint.CHAT, body, **headers)
    post(second, Endpoint.CHAT, body, **headers)
    assert first.getresponse().getheader("x-request-id") == "dup"
    assert first.sock is not None
    first.sock.shutdown(socket.SHUT_RDWR)
    first.close()
    response = second.getresponse()
    text = response.read().decode()
    second.close()
    assert text.endswith("data: [DONE]\n\n")
    wait_for(lambda: api.engine.running == 0)


def test_one_connection_serves_many_requests(api: Api, served: tuple[Api, str]) -> None:
    client = connection(served[1])
    for stream in (True, False, True):
        post(client, Endpoint.CHAT, {"messages": USER, "stream": stream})
        response = client.getresponse()
        assert response.status == 200
        assert b'"finish_reason":"stop"' in response.read()
    client.close()


def test_many_streams_end_together_and_nothing_stays(api: Api, served: tuple[Api, str]) -> None:
    api.say("", fill=65, delay=0.02)
    clients = [connection(served[1]) for _ in range(32)]
    for client in clients:
        post(client, Endpoint.COMPLETIONS, {"prompt": "x", "max_tokens": 400, "stream": True})
    wait_for(lambda: api.engine.running == 32)
    for client in clients:
        assert client.sock is not None
        client.sock.shutdown(socket.SHUT_RDWR)
        client.close()
    wait_for(lambda: api.engine.running == 0, seconds=1.0)
    wait_for(lambda: not api.observer.open, seconds=1.0)


def test_health_answers_while_a_template_works() -> None:
    slow = (
        "{% for i in range(2000) %}{% for j in range(2000) %}{% endfor %}{% endfor %}"
        "{{ messages[0].content }}"
    )
    api = make_api(text=text_model(slow))
    with serving(api.app) as url:
        worker = threading.Thread(
            target=lambda: httpx.post(url + Endpoint.CHAT, json={"messages": USER}, timeout=20)
        )
        worker.start()
        seconds = []
        with httpx.Client(base_url=url) as client:
            while worker.is_alive():
                began = time.perf_counter()
                assert client.get("/health").status_code == 200
                seconds.append(time.perf_counter() - began)
        worker.join()
    assert len(seconds) > 3
    assert sorted(seconds)[len(seconds) // 2] < 0.1


def test_a_bad_header_or_a_broken_request_leaves_the_server_whole(
    api: Api, served: tuple[Api, str]
) -> None:
    async def talk(data: bytes) -> bytes:
        host, _, port = served[1].removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(data)
        answer = await asyncio.wait_for(reader.read(), 5)
        writer.close()
        await writer.wait_closed()
        return answer

    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    head += b"Authorization: Bearer secret\r\n"
    answer = asyncio.run(talk(head + b"X-Request-Id: a\x00b\r\nContent-Length: 2\r\n\r\n{}"))
    assert b" 400 " in answer.splitlines()[0]
    # A method that HTTP does not know ends in the parser.
    answer = asyncio.run(talk(b"X123 /health HTTP/1.1\r\nHost: x\r\n\r\n"))
    assert b" 400 " in answer.splitlines()[0]
    answer = asyncio.run(talk(head + b"Content-Length: 99999999999\r\n\r\n"))
    assert b" 413 " in answer.splitlines()[0]
    client = connection(served[1])
    post(client, Endpoint.CHAT, {"messages": USER})
    assert client.getresponse().status == 200
    client.close()


def test_the_api_process_imports_no_torch(tmp_path: Path) -> None:
    code = """
import sys
import spark_server.api.app, spark_server.text.model, spark_server.engine_api
heavy = {"torch", "transformers", "xgrammar", "numba", "huggingface_hub"} & set(sys.modules)
print(sorted(heavy))
"""
    assert run_python(code, tmp_path).strip() == "[]"
