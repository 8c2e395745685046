"""Whatever a body holds, the answer is 2xx or a client error in the envelope, never a 5xx."""

from __future__ import annotations

import functools
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from spark_server.api.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from spark_server.engine_api import Endpoint
from tests.spark_server.api_harness import Api, error_of, make_api

BODIES: dict[str, Any] = {
    Endpoint.CHAT: ChatBody,
    Endpoint.COMPLETIONS: CompletionBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
# Names that lead deeper into messages, tools and formats than chance would.
WORDS = [
    "role", "content", "type", "text", "function", "name", "arguments", "parameters", "tool_calls",
    "user", "assistant", "system", "tool", "json_schema", "schema", "json_object", "properties",
    "none", "auto", "required", "include_usage", "enable_thinking", "<|im_end|>", "", "5",
]  # fmt: skip
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(WORDS),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "assistant", "tool", "system"]), "content": inner}
        ),
        st.fixed_dictionaries({"type": st.just("function"), "function": inner}),
    ),
    max_leaves=8,
)
MESSAGES = [{"role": "user", "content": "hi"}]
DEFAULTS: dict[str, dict[str, Any]] = {
    Endpoint.CHAT: {"messages": MESSAGES, "max_tokens": 2},
    Endpoint.COMPLETIONS: {"prompt": "hi", "max_tokens": 2},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
}


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    path = draw(st.sampled_from(list(BODIES)))
    names = draw(st.lists(st.sampled_from(list(BODIES[path].model_fields)), max_size=3))
    return path, DEFAULTS[path] | {name: draw(VALUES) for name in names}


@functools.cache
def shared_api() -> Api:
    api = make_api(grammar=True)
    api.say("ok <tool_call>{")
    return api


@settings(max_examples=200, deadline=None)
@given(requests())
def test_no_body_is_a_server_error(request: tuple[str, dict[str, Any]]) -> None:
    path, body = request
    api = shared_api()
    response = api.call("POST", path, raw=json.dumps(body).encode())
    if response.status_code != 200:
        assert response.status_code in (400, 404), (body, response.text)
        error_of(response)
    assert api.observer.open == set()
    assert api.engine.running == 0
