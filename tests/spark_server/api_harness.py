"""The API over the fake engine: called in process, or served on a real port. Knows no test."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from engine.request import GenerationRequest, RequestStats
from spark_server.api import ApiOptions, create_app
from spark_server.engine_api import Endpoint, ModelInfo, Outcome
from spark_server.text.model import TextModel
from tests.spark_server.fake_engine import FakeEngine, Script
from tests.spark_server.text_fixtures import added_id, text_model

VOCABULARY = 320  # padded beyond the tokenizer's
CONTEXT = 512


@dataclass
class Recorder:
    """A `RequestObserver` that keeps what it is told, and holds its protocol to it."""

    tokens: Counter[int] = field(default_factory=Counter)
    outcomes: list[Outcome] = field(default_factory=list)
    finished: list[tuple[int, Outcome, int, int]] = field(default_factory=list)
    open: set[int] = field(default_factory=set)
    starts: int = 0

    def on_start(self, key: int, endpoint: Endpoint, streaming: bool) -> None:
        assert key not in self.open
        self.open.add(key)
        self.starts += 1

    def on_first_token(self, key: int, seconds: float) -> None:
        assert key in self.open
        assert seconds >= 0
        assert self.tokens[key] == 0
        self.tokens[key] = 1

    def on_tokens(self, key: int, count: int, seconds: float) -> None:
        assert self.tokens[key] > 0
        assert count > 0
        self.tokens[key] += count

    def on_finish(
        self,
        key: int,
        outcome: Outcome,
        prompt_tokens: int,
        completion_tokens: int,
        seconds: float,
        stats: RequestStats | None,
    ) -> None:
        self.open.remove(key)
        assert self.tokens[key] == completion_tokens
        self.outcomes.append(outcome)
        self.finished.append((key, outcome, prompt_tokens, completion_tokens))


@dataclass
class Api:
    """An app with its parts at hand."""

    app: FastAPI
    engine: FakeEngine
    observer: Recorder
    text: TextModel

    def ids(self, text: str) -> list[int]:
        """Ids of a text in which markup is markup."""
        return self.text.tokenizer.encode(text)

    @property
    def last(self) -> GenerationRequest:
        """The last request that the engine got."""
        return self.engine.seen[-1]

    def say(self, text: str, **script: Any) -> None:
        """From now on every reply is `text`."""
        ids = self.ids(text)
        self.engine.script = lambda request: Script(ids, **script)

    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        raw: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        """One request, in process."""
        content = raw if raw is not None else None if body is None else json.dumps(body).encode()

        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, content=content, headers=headers)

        return asyncio.run(send())

    def chat(self, content: str = "hi", **fields: Any) -> httpx.Response:
        """POST a chat of one user message."""
        messages = fields.pop("messages", [{"role": "user", "content": content}])
        return self.call("POST", Endpoint.CHAT, {"messages": messages, **fields})

    def complete(self, prompt: object = "hi", **fields: Any) -> httpx.Response:
        """POST a completion."""
        return self.call("POST", Endpoint.COMPLETIONS, {"prompt": prompt, **fields})


def make_api(
    *,
    options: ApiOptions | None = None,
    text: TextModel | None = None,
    script: Callable[[GenerationRequest], Script] = lambda request: Script(),
    grammar: bool = False,
    context: int = CONTEXT,
) -> Api:
    """An API over a fake engine that is ready."""
    text = text or text_model()
    info = ModelInfo("tiny", VOCABULARY, context, 8, (added_id("<|im_end|>"),), grammar=grammar)
    engine, observer = FakeEngine(info, script), Recorder()

    def page(accept: str) -> tuple[bytes, str]:
        return f"# {accept}\n".encode(), "text/plain; version=0.0.4"

    app = create_app(engine, text, options or ApiOptions(), observer, page)
    return Api(app, engine, observer, text)


def events_of(response: httpx.Response) -> list[Any]:
    """The events of a stream: JSON values, and "[DONE]"."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    data = [block.removeprefix("data: ") for block in blocks]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of a response, after checking its envelope."""
    body = response.json()
    assert list(body) == ["error"], body
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    return error


@contextlib.contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """Serve `app` on a free port from a thread; gives the base URL."""
    config = uvicorn.Config(app, port=0, log_config=None, ws="none", timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        wait_for(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)


def wait_for(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait until `condition` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)
