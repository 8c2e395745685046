"""Real servers and answers that several tests share; servers must end without a complaint."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from engine.core import EngineCore
from engine.request import FinishReason
from tests.e2e.servers import serving, wait_idle
from tests.e2e.work import COUNT, Answer, core, requests, run
from tests.spark_server.test_server import Server


@pytest.fixture(scope="session")
def roomy() -> Iterator[Server]:
    """A server with room for 32 sequences."""
    with serving("--max-batch-size", "32", "--max-seq-len", "1024") as running:
        yield running


@pytest.fixture(scope="session")
def cramped() -> Iterator[Server]:
    """A server whose KV pool holds little more than one long sequence, with a short queue."""
    words = ("--max-batch-size", "4", "--max-seq-len", "256", "--kv-tokens", "320")
    with serving(*words, "--max-waiting", "6", "--max-prefill-tokens", "64") as running:
        yield running


@pytest.fixture
def server(roomy: Server) -> Iterator[Server]:
    """The roomy server, idle before and after the test."""
    wait_idle(roomy.url)
    yield roomy
    wait_idle(roomy.url)


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def wide() -> EngineCore:
    return core()


@pytest.fixture(scope="session")
def alone(wide: EngineCore) -> dict[int, Answer]:
    answers = run(wide, requests(), 1)
    assert {answer.reason for answer in answers.values()} <= {
        FinishReason.LENGTH,
        FinishReason.STOP,
    }
    assert sum(len(answer.tokens) for answer in answers.values()) > 5 * COUNT
    return answers
