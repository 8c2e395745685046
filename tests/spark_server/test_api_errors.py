"""Refusals, failures, keys and the small routes: one envelope, the right status."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import EngineUnavailableError, QueueFullError
from spark_server.api import ApiOptions
from spark_server.engine_api import Endpoint, EngineState, Outcome
from tests.spark_server.api_harness import (
    CONTEXT,
    VOCABULARY,
    error_of,
    events_of,
    make_api,
)
from tests.spark_server.fake_engine import Script
from tests.spark_server.text_fixtures import added_id


@pytest.mark.parametrize("path", [Endpoint.CHAT, Endpoint.COMPLETIONS, "/tokenize", "/detokenize"])
@pytest.mark.parametrize("raw", [b"[]", b"null", b"123", b"{", b"", b"\xff", b'{"a":1,"a":2}'])
def test_bodies_that_are_no_object_are_the_clients_mistake(path: str, raw: bytes) -> None:
    response = make_api().call("POST", path, raw=raw)
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"


def test_wrong_paths_methods_and_models_use_the_same_envelope() -> None:
    api = make_api()
    assert error_of(api.call("GET", "/nope"))["code"] == "not_found"
    assert error_of(api.call("GET", "/v1/models/"))["code"] in ("not_found", "model_not_found")
    wrong = api.call("GET", Endpoint.CHAT)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert error_of(wrong)["code"] == "method_not_allowed"
    for response in (
        api.chat(model="nope"),
        api.complete(model="nope"),
        api.call("GET", "/v1/models/a/b"),
    ):
        assert response.status_code == 404
        assert error_of(response)["code"] == "model_not_found"
        assert error_of(response)["param"] == "model"


def test_a_body_above_the_limit_is_413() -> None:
    api = make_api(options=ApiOptions(max_body_bytes=200))
    response = api.chat("x" * 300)
    assert response.status_code == 413
    assert error_of(response)["code"] == "body_too_large"
    assert api.chat("x").status_code == 200


def test_template_attacks_in_a_request_are_refused() -> None:
    api = make_api()
    assert error_of(api.chat(chat_template="{{ 1 }}"))["param"] == "chat_template"
    for name in ("chat_template", "messages", "tools", "add_generation_prompt", "bos_token", "_x"):
        error = error_of(api.chat(chat_template_kwargs={name: "x"}))
        assert error["param"] == "chat_template_kwargs"
    deep: Any = 1
    for _ in range(500):
        deep = [deep]
    assert error_of(api.chat(chat_template_kwargs={"a": deep}))["param"] == "chat_template_kwargs"
    assert api.engine.seen == []


@pytest.mark.parametrize("stream", [True, False])
def test_refusals_of_the_engine_keep_their_status(stream: bool) -> None:
    api = make_api()
    api.engine.script = lambda r: Script(refuse=QueueFullError("64 wait already", retry_after=3))
    response = api.chat(stream=stream, n=2)
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert error_of(response)["code"] == "queue_full"
    api.engine.script = lambda r: Script(refuse=EngineUnavailableError("it restarts"))
    response = api.chat(stream=stream)
    assert response.status_code == 503
    assert error_of(response)["type"] == "server_error"
    assert set(api.observer.outcomes) <= {Outcome.REJECTED, Outcome.UNAVAILABLE, Outcome.ABORT}
    assert api.observer.open == set()


def test_a_failure_after_the_first_token_ends_the_stream_with_an_error_event() -> None:
    api = make_api()
    api.say("abcdef", fail_after=3)
    events = events_of(api.chat(stream=True))
    assert events[-1]["error"]["message"] == "the engine process ended"
    assert "[DONE]" not in events
    response = api.chat()
    assert response.status_code == 503
    assert error_of(response)["code"] == "engine_error"
    assert api.observer.outcomes == [Outcome.ERROR, Outcome.ERROR]


def test_an_unexpected_exception_is_a_500_in_the_envelope() -> None:
    api = make_api()
    api.engine.script = lambda r: Script(refuse=ZeroDivisionError("secret"))
    response = api.chat()
    assert response.status_code == 500
    assert "secret" not in response.text
    assert error_of(response)["code"] == "internal_error"
    assert api.observer.outcomes == [Outcome.ERROR]


# -- keys, ids and the small routes --------------------------------------------------------


def test_keys_are_asked_for_everywhere_but_on_health_and_ready() -> None:
    api = make_api(options=ApiOptions(api_keys=("one", "zwö")))
    for path in ("/v1/models", "/metrics", "/version", "/debug/ledger", "/docs", "/nope"):
        refused = api.call("GET", path)
        assert refused.status_code == 401
        assert error_of(refused)["code"] == "invalid_api_key"
    for path in ("/health", "/ready"):
        assert api.call("GET", path).status_code == 200
    for key, status in (("one", 200), ("zwö", 200), ("on", 401), ("", 401), ("one two", 401)):
        header = {"Authorization": f"Bearer {key}".encode()}
        assert api.call("GET", "/v1/models", headers=header).status_code == status  # type: ignore[arg-type]
    assert api.call("GET", "/v1/models", headers={"Authorization": "one"}).status_code == 401


@pytest.mark.parametrize("given", ["dup", "a" * 5000, 'x"y', "\x1b[31m", ""])
def test_request_ids_are_echoed_only_when_harmless(given: str) -> None:
    response = make_api().call("GET", "/health", headers={"X-Request-Id": given})
    echoed = response.headers.get_list("x-request-id")
    assert len(echoed) == 1
    assert (echoed[0] == given) == (given == "dup")
    assert len(echoed[0]) <= 128


@pytest.mark.parametrize(
    ("state", "health", "ready"),
    [
        (EngineState.READY, 200, 200),
        (EngineState.LOADING, 200, 503),
        (EngineState.DRAINING, 200, 503),
        (EngineState.DEAD, 503, 503),
        (EngineState.STUCK, 503, 503),
    ],
)
def test_health_and_readiness_differ(state: EngineState, health: int, ready: int) -> None:
    api = make_api()
    api.engine.now, api.engine.stalled = state, 12.5
    assert api.call("GET", "/health").status_code == health
    response = api.call("GET", "/ready")
    assert response.status_code == ready
    assert response.json() == {"status": state.value, "seconds_without_progress": 12.5}
    chat = api.chat()
    assert chat.status_code == ready
    if ready != 200:
        assert error_of(chat)["code"] == "engine_unavailable"
        assert "retry-after" in chat.headers
        assert api.observer.outcomes == [Outcome.UNAVAILABLE]


def test_models_are_listed_with_their_true_limits() -> None:
    api = make_api(options=ApiOptions(served_names=("alias/x",)))
    data = api.call("GET", "/v1/models").json()["data"]
    assert [model["id"] for model in data] == ["tiny", "alias/x"]
    assert (data[0]["max_model_len"], data[0]["max_batch_size"]) == (CONTEXT, 8)
    assert api.call("GET", "/v1/models/alias/x").json()["root"] == "tiny"
    assert api.chat(model="alias/x").json()["model"] == "alias/x"
    api.engine.model = None
    assert api.call("GET", "/v1/models").status_code == 503


def test_tokenize_and_detokenize_are_inverse() -> None:
    api = make_api()
    text = "a<|im_end|>你好"
    ids = api.call("POST", "/tokenize", {"prompt": text}).json()
    assert ids["count"] == len(ids["tokens"])
    assert ids["max_model_len"] == CONTEXT
    assert added_id("<|im_end|>") in ids["tokens"]
    assert api.call("POST", "/detokenize", {"tokens": ids["tokens"]}).json() == {"prompt": text}
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    tokens = api.call("POST", "/tokenize", chat).json()["tokens"]
    api.chat("hi")
    assert tuple(tokens) == api.last.prompt_ids
    assert error_of(api.call("POST", "/tokenize", {}))["param"] == "prompt"
    assert error_of(api.call("POST", "/detokenize", {"tokens": [VOCABULARY]}))["param"] == "tokens"


def test_the_small_pages() -> None:
    api = make_api()
    assert "version" in api.call("GET", "/version").json()
    page = api.call("GET", "/metrics", headers={"Accept": "text/x"})
    assert (page.text, page.headers["content-type"]) == ("# text/x\n", "text/plain; version=0.0.4")
    assert api.call("GET", "/debug/ledger").status_code == 503
    api.engine.table = {"terms": []}
    assert api.call("GET", "/debug/ledger").json() == {"terms": []}
    paths = api.call("GET", "/openapi.json").json()["paths"]
    schema = paths[Endpoint.CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "max_completion_tokens" in schema["properties"]


def test_what_the_observer_is_told_adds_up() -> None:
    api = make_api()
    api.say("abcdef", burst=2)
    api.chat(n=2)
    api.complete(["a", "b"], stream=True)
    api.chat(stop="c")
    api.chat(temperature=-1)
    assert api.observer.open == set()
    assert api.observer.starts == len(api.observer.outcomes) == 6
    counts = [tokens for _, _, _, tokens in api.observer.finished]
    assert counts == [7, 7, 7, 7, 3, 0]
    assert api.observer.outcomes == [Outcome.STOP] * 5 + [Outcome.REJECTED]
