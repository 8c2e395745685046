"""Speculation from outside: same text, and what /metrics and the answers say of the drafts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.servers import gauges, serving, wait_idle, wait_until
from tests.spark_server.test_server import Server

pytestmark = pytest.mark.server

QUESTIONS = ("Tell me a story about a fox.", "What is the highest mountain?", "What is 3 + 4?")
SAMPLING: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 0.8, "seed": 7})
PREFIX = "spark_spec_decode_"


@pytest.fixture(scope="module")
def drafting() -> Iterator[Server]:
    """A server whose ladder drafts at any width up to 8."""
    words = ("--speculative", "--num-drafts", "2", "--spec-controller", "off")
    with serving(*words, "--max-batch-size", "8", "--max-seq-len", "1024") as running:
        yield running


def choice(url: str, question: str, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 48} | fields
    answer = httpx.post(url + "/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["choices"][0])


def series(url: str, name: str) -> float:
    return gauges(url)[PREFIX + name]


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("question", QUESTIONS)
def test_the_text_is_the_same(
    server: Server, drafting: Server, question: str, sampling: dict[str, Any]
) -> None:
    plain = choice(server.url, question, **sampling)
    assert choice(drafting.url, question, **sampling) == plain


def test_the_answer_and_the_page_agree_on_drafts(drafting: Server) -> None:
    url = drafting.url
    wait_idle(url)
    names = ("num_draft_tokens_total", "num_accepted_tokens_total", "num_drafts_total",
             "accepted_length_sum", "accepted_length_count",
             'num_accepted_tokens_per_pos_total{position="0"}',
             'num_accepted_tokens_per_pos_total{position="1"}')  # fmt: skip
    before = {name: series(url, name) for name in names}
    told = choice(url, QUESTIONS[0], temperature=0.0, metrics=True)["metrics"]
    wait_idle(url)
    now = {name: series(url, name) - before[name] for name in names}
    assert 0 < told["accepted_tokens"] <= told["drafted_tokens"]
    assert now["num_draft_tokens_total"] == told["drafted_tokens"]
    assert now["num_accepted_tokens_total"] == told["accepted_tokens"]
    assert now["accepted_length_sum"] == told["accepted_tokens"]
    assert now["num_drafts_total"] == now["accepted_length_count"]
    assert told["drafted_per_position"][0] == now["num_drafts_total"]
    assert sum(told["drafted_per_position"]) == told["drafted_tokens"]
    assert told["accepted_per_position"] == [now[names[5]], now[names[6]]]


def test_the_page_shows_that_it_speculates(drafting: Server) -> None:
    url = drafting.url
    choice(url, QUESTIONS[0], temperature=0.0)
    wait_idle(url)
    page = gauges(url)
    assert page[PREFIX + 'rung{width="1"}'] == 2
    assert page[PREFIX + 'width_draft_tokens_total{width="1"}'] > 0
    assert page[PREFIX + 'steps_total{kind="speculative"}'] > 0
    assert page[PREFIX + 'step_seconds_total{kind="speculative"}'] > 0
    assert page[PREFIX + "state_bytes_total"] > 0
    wait_until(lambda: series(url, 'active_slots{covered="true"}') == 0, 2, "no active slots")


def test_the_page_of_a_plain_server_shows_zeros(server: Server) -> None:
    told = choice(server.url, QUESTIONS[0], temperature=0.0, metrics=True)["metrics"]
    assert (told["drafted_tokens"], told["drafted_per_position"]) == (0, [])
    found = {n: v for n, v in gauges(server.url).items() if n.startswith(PREFIX)}
    assert found
    assert set(found.values()) == {0.0}
