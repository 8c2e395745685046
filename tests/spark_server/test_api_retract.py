"""Tokens that the engine takes back: an answer that is not streamed never had them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from engine.request import FinishReason, GenerationRequest, RequestStats, TokenDelta, TokenLogprobs
from tests.spark_server.api_harness import Api, error_of, events_of, make_api
from tests.spark_server.fake_engine import FakeEngine

Part = tuple[int, str]  # tokens taken back, text that follows

CALL = "<tool_call>\n<function=f>\n<parameter=city>\nRo"


def scripted(
    api: Api,
    *parts: Part,
    reason: FinishReason = FinishReason.STOP,
    stop_id: int | None = None,
) -> None:
    """From now on the engine gives these parts, and ends without a stop id."""

    async def generate(request: GenerationRequest) -> AsyncGenerator[TokenDelta, None]:
        api.engine.seen.append(request)
        for number, (back, text) in enumerate(parts, 1):
            ids = tuple(api.ids(text))
            last = number == len(parts)
            yield TokenDelta(
                request.request_id,
                (*ids, stop_id) if last and stop_id is not None else ids,
                logprobs(request.sampling.logprobs, ids),
                reason if last else None,
                stop_id if last else None,
                retract=back,
                stats=RequestStats(rollbacks=1, retracted=back) if last else None,
            )

    api.engine.generate = generate  # type: ignore[method-assign]


def logprobs(count: int | None, ids: Sequence[int]) -> tuple[TokenLogprobs, ...]:
    return () if count is None else tuple(TokenLogprobs(-float(i)) for i in ids)


def plain(api: Api, text: str, **fields: Any) -> dict[str, Any]:
    """The answer of an engine that never took anything back."""
    scripted(api, (0, text))
    return answer(api, **fields)


def answer(api: Api, **fields: Any) -> dict[str, Any]:
    body = dict(api.complete(**fields).json())
    return {key: body[key] for key in ("choices", "usage")}


@pytest.mark.parametrize(
    "parts",
    [
        [(0, "one two two"), (4, " three")],
        [(0, "one"), (0, " two"), (0, " two"), (4, ""), (0, " three")],
        [(0, "on"), (2, ""), (0, "one two three four"), (5, "")],
        [(0, "one two 好"), (3, "three")],
    ],
)
def test_the_answer_is_as_if_they_had_never_come(parts: list[Part]) -> None:
    api = make_api()
    expected = plain(api, "one two three", logprobs=0)
    scripted(api, *parts)
    assert answer(api, logprobs=0) == expected
    assert api.last.retractable
    # Every token that came is counted, as it was when it came.
    (key, _, _, tokens) = api.observer.finished[-1]
    assert tokens == sum(len(api.ids(text)) for _, text in parts) == api.observer.tokens[key]


def test_chat_text_is_taken_back_too() -> None:
    api = make_api()
    scripted(api, (0, "good good good"), (10, " day"))
    body = api.chat(metrics=True).json()
    (choice,) = body["choices"]
    assert choice["message"]["content"] == "good day"
    assert choice["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == len(api.ids("good day"))
    assert choice["metrics"]["rollbacks"] == 1
    assert choice["metrics"]["retracted_tokens"] == 10


def test_a_stop_string_is_found_across_the_cut() -> None:
    api = make_api()
    scripted(api, (0, "ab abE"), (1, "ND tail"))
    body = answer(api, stop=["bND"])
    assert body["choices"][0]["text"] == "ab a"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == len(api.ids("ab abE")) - 1 + len("ND")


def test_a_stop_string_that_was_found_ends_the_answer_before_anything_is_taken_back() -> None:
    api = make_api()
    scripted(api, (0, "ab END"), (3, "x"))
    assert answer(api, stop=["END"])["choices"][0]["text"] == "ab "


def test_a_stream_is_not_retractable() -> None:
    api = make_api()
    api.say("hello")
    events_of(api.complete(stream=True))
    assert not api.last.retractable
    events_of(api.chat(stream=True))
    assert not api.last.retractable


def test_a_stream_that_is_taken_back_anyway_ends_in_an_error() -> None:
    api = make_api()
    scripted(api, (0, "hello"), (2, "p"))
    events = events_of(api.complete(stream=True))
    assert "error" in events[-1]


def test_more_than_was_given_cannot_be_taken_back() -> None:
    api = make_api()
    scripted(api, (0, "a"), (2, "b"))
    answer = api.complete()
    assert answer.status_code == 500
    assert error_of(answer)["message"] == "the engine took back more than it gave"


def test_a_call_that_a_watchdog_broke_off_is_no_call() -> None:
    """An end that the model chose closes what is open, one that it did not choose does not."""
    api = make_api()
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    scripted(api, (0, CALL), stop_id=1)
    whole = api.chat(tools=tools).json()["choices"][0]
    assert whole["finish_reason"] == "tool_calls"
    scripted(api, (0, CALL))
    broken = api.chat(tools=tools).json()["choices"][0]
    assert broken["finish_reason"] == "stop"
    assert isinstance(api.engine, FakeEngine)
