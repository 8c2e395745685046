"""An engine that dies or freezes, clients that leave, a server told to end, a full queue."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.e2e.servers import busy_gauges, complete, gauges, serving, wait_idle, wait_until
from tests.spark_server.test_server import Server

pytestmark = pytest.mark.server
CLIENTS = 32


@dataclass
class Seen:
    """What one client got."""

    stream: bool
    status: int = 0
    text: str = ""
    ended: float = 0.0

    @property
    def error(self) -> str | None:
        """The message of the error that ended it, or None when it ended well."""
        if not self.stream:
            value = json.loads(self.text)
            return value["error"]["message"] if "error" in value else None
        events = [line[6:] for line in self.text.splitlines() if line.startswith("data: ")]
        for event in events:
            if event != "[DONE]" and "error" in json.loads(event):
                return str(json.loads(event)["error"]["message"])
        assert events[-1] == "[DONE]", self.text[-300:]
        return None


async def crowd(
    url: str, tokens: int, act: Callable[[], object], *, leave: bool = False
) -> list[Seen]:
    """CLIENTS long requests, every second one streamed; `act` once all of them run.

    Args:
        leave: close every connection after `act` instead of reading on.
    """
    seen = [Seen(stream=number % 2 == 0) for number in range(CLIENTS)]

    async def one(client: httpx.AsyncClient, number: int) -> None:
        mine = seen[number]
        body = {
            "prompt": [3 + number] * (1 + 7 * number),
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": mine.stream,
        }
        async with client.stream("POST", url + "/v1/completions", json=body) as response:
            mine.status = response.status_code
            async for part in response.aiter_text():
                mine.text += part
        mine.ended = time.monotonic()

    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=60) as client:
        tasks = [asyncio.create_task(one(client, number)) for number in range(CLIENTS)]
        running = "spark_requests_running"
        await asyncio.to_thread(
            wait_until, lambda: gauges(url)[running] == CLIENTS, 20, "all requests run"
        )
        while not all(mine.text for mine in seen if mine.stream):
            await asyncio.sleep(0.01)
        act()
        if leave:
            for task in tasks:
                task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks)
    return seen


def works(url: str, seconds: float) -> None:
    """A new request is answered within `seconds`; until the engine is back it is a 503."""

    def answered() -> bool:
        answer = complete(url, prompt="Hello", max_tokens=4)
        if answer.status_code == 503:
            assert answer.headers["retry-after"]
            return False
        assert answer.status_code == 200, answer.text
        return True

    wait_until(answered, seconds, "the engine is back")
    wait_idle(url)


@pytest.fixture(scope="module")
def shaky() -> Iterator[Server]:
    """A server whose engine is lost twice."""
    words = ("--max-batch-size", "32", "--max-seq-len", "2048", "--stuck-timeout", "3")
    with serving(
        *words,
        expect=(
            r"error   The engine made no progress for 3\.\d s with 32 requests; it is ended\n",
            r"error   The engine ended \(signal 9\) with 32 requests; it is started anew.*\n",
        ),
    ) as running:
        yield running


@pytest.mark.parametrize(
    ("number", "limit"),
    [(signal.SIGKILL, 5.0), (signal.SIGSTOP, 8.0)],
    ids=["killed", "frozen"],
)
def test_every_client_of_a_lost_engine_gets_an_answer(
    shaky: Server, number: int, limit: float
) -> None:
    engine = shaky.engine()
    began = 0.0
    failed = 'spark_requests_finished_total{endpoint="/v1/completions",outcome="error"}'
    before = gauges(shaky.url)

    def lose() -> None:
        nonlocal began
        began = time.monotonic()
        engine.send_signal(number)

    seen = asyncio.run(crowd(shaky.url, 1800, lose))
    assert len(seen) == CLIENTS
    for mine in seen:
        assert mine.error is not None
        assert mine.status == (200 if mine.stream else 503), mine.text[-200:]
        assert mine.ended - began < limit
    works(shaky.url, 40)
    assert not engine.is_running()
    assert shaky.engine().pid != engine.pid
    now = gauges(shaky.url)
    restarts = "spark_engine_restarts_total"
    assert now[restarts] == before[restarts] + 1
    # Those who ask while the engine is away are counted too.
    assert now[failed] >= before.get(failed, 0) + CLIENTS


def test_clients_that_leave_give_everything_back(server: Server) -> None:
    began = 0.0

    def leave() -> None:
        nonlocal began
        began = time.monotonic()

    aborted = 'spark_requests_finished_total{endpoint="/v1/completions",outcome="abort"}'
    before = gauges(server.url).get(aborted, 0)
    asyncio.run(crowd(server.url, 700, leave, leave=True))
    wait_until(lambda: not busy_gauges(server.url), began + 1 - time.monotonic(), "all is idle")
    assert gauges(server.url)[aborted] == before + CLIENTS
    assert complete(server.url, prompt="Hello", max_tokens=4).status_code == 200


def test_sigterm_lets_running_requests_end() -> None:
    with serving("--max-batch-size", "32", "--max-seq-len", "1024") as running:
        refused: list[int] = []

        def stop() -> None:
            running.process.send_signal(signal.SIGTERM)
            running.wait_for("Draining")
            refused.append(complete(running.url, prompt="x", max_tokens=1).status_code)

        engine = running.engine()
        seen = asyncio.run(crowd(running.url, 150, stop))
        assert refused == [503]
        assert [mine.error for mine in seen] == [None] * CLIENTS
        for mine in seen:
            assert mine.stream or json.loads(mine.text)["usage"]["completion_tokens"] == 150
        assert running.process.wait(10) == 0
        assert not engine.is_running()


def test_a_full_queue_refuses_and_goes_on(cramped: Server) -> None:
    """Four run and six wait; the others hear 429 at once and may come again."""

    async def burst(count: int) -> list[httpx.Response]:
        async with httpx.AsyncClient(
            limits=httpx.Limits(max_connections=None), timeout=60
        ) as client:
            body: dict[str, Any] = {"prompt": "x", "max_tokens": 120, "ignore_eos": True}
            path = cramped.url + "/v1/completions"
            return await asyncio.gather(*(client.post(path, json=body) for _ in range(count)))

    wait_idle(cramped.url)
    answers = asyncio.run(burst(24))
    statuses = sorted(answer.status_code for answer in answers)
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 10
    for answer in answers:
        if answer.status_code == 429:
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["type"] == "rate_limit_error"
        else:
            assert answer.json()["usage"]["completion_tokens"] == 120
    wait_idle(cramped.url)
    assert complete(cramped.url, prompt="x", max_tokens=1).status_code == 200
