"""Chat templates: rendered as transformers does, in bounds whatever the template does."""

from __future__ import annotations

import time

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from engine.errors import ModelFormatError, RequestError
from spark_server.text import template as template_module
from spark_server.text.template import ChatTemplate
from tests.spark_server.text_fixtures import HERMES_TEMPLATE, XML_TEMPLATE

TOOLS = [{"type": "function", "function": {"name": "f", "description": "é <b>", "parameters": {}}}]
MESSAGES = [
    {"role": "system", "content": "Be kind"},
    {"role": "user", "content": "grüß 'dich' <b>"},
    {
        "role": "assistant",
        "content": "ok",
        "reasoning_content": "hm",
        "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": {"a": "ü", "b": [1]}}}
        ],
    },
    {"role": "tool", "content": "18C"},
]


@pytest.mark.parametrize("source", [XML_TEMPLATE, HERMES_TEMPLATE])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("thinking", [True, False])
def test_rendering_equals_that_of_transformers(
    source: str, tools: list[dict[str, object]] | None, thinking: bool
) -> None:
    theirs, _ = render_jinja_template(
        conversations=[MESSAGES],
        tools=tools,
        chat_template=source,
        add_generation_prompt=True,
        enable_thinking=thinking,
    )
    ours = ChatTemplate(source, {}).render(MESSAGES, tools, {"enable_thinking": thinking})
    assert ours == theirs[0]


def test_tags_and_loop_controls_of_published_templates_work() -> None:
    source = (
        "{% generation %}a{% endgeneration %}{% for i in range(9) %}{% if i == 2 %}{% break %}"
        "{% endif %}{{ i }}{% endfor %}{{ strftime_now('%Y')|length }}{{ [1]|tojson(indent=2) }}"
    )
    assert ChatTemplate(source, {}).render([], None, {}) == "a014[\n  1\n]"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10**9 }}",
        "{{ ('a' * 1000000) * 1000 }}",
        "{{ 9 ** 999999999 }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '{:>999999999}'.format(1) }}",
        "{{ 'x'.ljust(999999999) }}",
        "{{ [1]|tojson(indent=999999999) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ range(999999999) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ raise_exception('no') }}",
        "{{ messages[0].content + 5 }}",
        "{{ missing.field }}",
    ],
)
def test_attacks_end_soon_and_as_a_client_error(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_module, "MAX_SECONDS", 0.3)
    began = time.monotonic()
    with pytest.raises(RequestError) as caught:
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}], None, {})
    assert caught.value.status == 400
    assert caught.value.param == "messages"
    assert time.monotonic() - began < 2


def test_a_template_that_does_not_compile_is_a_fault_of_the_model() -> None:
    with pytest.raises(ModelFormatError, match="does not compile"):
        ChatTemplate("{% if %}", {})


def test_a_request_cannot_replace_the_messages() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {"eos_token": "E"})
    text = template.render([{"role": "user", "content": "mine"}], None, {"messages": []})
    assert text == "mine"
