"""The engine in its own process: streams, crash, freeze, drain, abort, restart, parent's death."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import spark_server
from engine.config import EngineConfig
from engine.errors import EngineUnavailableError, InvariantError, QueueFullError, RequestError
from engine.request import FinishReason, GenerationRequest, SamplingParams, TokenDelta
from spark_server.engine_api import EngineState
from spark_server.engine_client import ProcessEngineClient
from spark_server.metrics import Metrics
from spark_server.wire import Launch
from tests.spark_server.fake_core import COMPUTE, EXIT, FULL, HANG, RAISE, REFUSE, VOCAB

REPO = Path(spark_server.__file__).parent.parent
FACTORY = "tests.spark_server.fake_core:build"


@pytest.fixture(autouse=True)
def _clean_processes(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[None]:
    """Warnings of the engine process are errors, and it leaves no process and no folder behind."""
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    # Servers of other test modules may live as long as the session.
    before = set(psutil.Process().children())
    yield
    text = capfd.readouterr().err
    assert "Warning" not in text, text
    # Bugs on purpose are the only tracebacks.
    assert text.count("Traceback") == text.count("The engine failed"), text
    left = set(psutil.Process().children()) - before
    assert not [child for child in left if child.status() != psutil.STATUS_ZOMBIE]


def launch(options: str = "", **config: Any) -> Launch:
    config = {"device": "cpu", "dtype": "float32", "memory_budget": 2**20} | config
    return Launch(
        FACTORY, "", "", EngineConfig(model_dir=f"fake?{options}", **config), model_id="fake"
    )


@contextlib.asynccontextmanager
async def engine(
    options: str = "", *, backoff: tuple[float, ...] = (0.05,), stuck: float = 20.0, **config: Any
) -> AsyncIterator[ProcessEngineClient]:
    client = ProcessEngineClient(
        launch(options, **config), stuck_timeout=stuck, metrics=Metrics(), backoff=backoff
    )
    await client.start()
    try:
        await asyncio.wait_for(client.ready(), 20)
        yield client
    finally:
        await client.shutdown(0)


def request(number: int, *prompt: int, tokens: int = 5) -> GenerationRequest:
    return GenerationRequest(number, prompt or (number,), SamplingParams(max_tokens=tokens))


async def collect(client: ProcessEngineClient, wanted: GenerationRequest) -> list[TokenDelta]:
    return [delta async for delta in client.generate(wanted)]


async def eventually(what: Callable[[], bool], seconds: float = 10.0) -> float:
    began = time.monotonic()
    while not what():
        assert time.monotonic() - began < seconds, "it did not happen in time"
        await asyncio.sleep(0.01)
    return time.monotonic() - began


def run(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(_as_coroutine(body), 50), debug=False)


async def _as_coroutine(body: Callable[[], Awaitable[None]]) -> None:
    await body()


def tokens_of(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def test_streams_run_together_and_keep_their_order() -> None:
    async def body() -> None:
        async with engine() as client:
            wanted = [request(n, n, tokens=50) for n in range(1, 101)]
            done = await asyncio.gather(*(collect(client, one) for one in wanted))
            for one, deltas in zip(wanted, done, strict=True):
                first = one.prompt_ids[-1] + 1
                assert tokens_of(deltas) == [(first + i) % VOCAB for i in range(50)]
                reasons = [d.finish_reason for d in deltas]
                assert reasons == [None] * 49 + [FinishReason.LENGTH]
                assert deltas[-1].stats is not None
            assert client.age() == 0
            stats = client.stats()
            assert stats is not None
            assert (stats.running, stats.waiting) == (0, 0)

    run(body)


def test_what_ready_says() -> None:
    async def body() -> None:
        async with engine(max_batch_size=3, max_waiting=5, max_seq_len=99) as client:
            info = client.info()
            assert info is not None
            assert (info.model_id, info.vocab_size, info.eos_token_ids) == ("fake", VOCAB, (0,))
            assert (info.max_batch_size, info.max_waiting, info.max_seq_len) == (3, 5, 99)
            ledger = client.ledger()
            assert ledger is not None
            assert ledger["total_bytes"] == 1024
            page = client.metrics.render()[0].decode()
            assert 'spark_ledger_bytes{kind="exact",term="weights"} 1000.0' in page
            assert 'spark_engine_start_seconds{phase="known answer"}' in page
            assert "spark_engine_generation_tokens_total 0.0" in page, "the probe does not count"
            assert 'spark_engine_state{state="ready"} 1.0' in page

    run(body)


def test_logprobs_cross_the_border_as_they_are() -> None:
    async def body() -> None:
        async with engine() as client:
            wanted = GenerationRequest(1, (7,), SamplingParams(max_tokens=1, logprobs=1))
            (delta,) = await collect(client, wanted)
            assert delta.logprobs[0].logprob == -0.5
            assert delta.logprobs[0].top == ((8, -0.5),)

    run(body)


def test_a_refused_request_raises_what_the_core_raised() -> None:
    async def body() -> None:
        async with engine() as client:
            with pytest.raises(RequestError) as refused:
                await collect(client, request(1, REFUSE))
            assert (refused.value.param, refused.value.code) == ("prompt", "fake")
            with pytest.raises(QueueFullError) as full:
                await collect(client, request(2, FULL))
            assert (full.value.retry_after, full.value.status) == (7, 429)
            assert tokens_of(await collect(client, request(3)))

    run(body)


def test_more_than_running_and_waiting_is_refused_at_once() -> None:
    async def body() -> None:
        async with engine("step_ms=20", max_batch_size=2, max_waiting=3) as client:
            tasks = [
                asyncio.create_task(collect(client, request(n, tokens=10))) for n in range(1, 6)
            ]
            await asyncio.sleep(0)
            with pytest.raises(QueueFullError, match="5 sequences"):
                await collect(client, request(6))
            assert all(len(deltas) == 10 for deltas in await asyncio.gather(*tasks))
            assert len(await collect(client, request(7))) == 5

    run(body)


def test_an_id_in_use_is_a_bug() -> None:
    async def body() -> None:
        async with engine("step_ms=20") as client:
            stream = client.generate(request(1, tokens=100))
            await anext(stream)
            with pytest.raises(InvariantError):
                await collect(client, request(1))
            await stream.aclose()

    run(body)


def test_closing_aborts_and_gauges_go_idle_without_a_new_request() -> None:
    async def body() -> None:
        async with engine("step_ms=5", max_batch_size=4) as client:
            streams = [client.generate(request(n, tokens=100_000)) for n in range(1, 33)]
            running = [asyncio.ensure_future(anext(stream)) for stream in streams]
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            for stream in streams:
                await stream.aclose()

            def idle() -> bool:
                stats = client.stats()
                assert stats is not None
                return (stats.running, stats.waiting, stats.slots_used) == (0, 0, 0)

            assert await eventually(idle) < 1
            stats = client.stats()
            assert stats is not None
            await asyncio.sleep(0.1)
            assert client.stats() == stats, "nothing is generated after the abort"
            page = client.metrics.render()[0].decode()
            assert "spark_requests_running 0.0" in page
            assert "spark_kv_blocks_used 0.0" in page

    run(body)


@pytest.mark.parametrize("trouble", [RAISE, EXIT])
def test_a_crash_ends_every_stream_and_the_engine_comes_back(trouble: int) -> None:
    async def body() -> None:
        async with engine("step_ms=5") as client:
            first = client.pid
            tasks = [
                asyncio.create_task(collect(client, request(n, tokens=100_000)))
                for n in range(1, 32)
            ]
            await asyncio.sleep(0.1)
            tasks.append(asyncio.create_task(collect(client, request(99, trouble))))
            began = time.monotonic()
            for deltas in await asyncio.gather(*tasks):
                assert deltas[-1].finish_reason is FinishReason.ERROR
                assert deltas[-1].error_status == 503
            assert time.monotonic() - began < 2
            assert client.state() is EngineState.DEAD
            with pytest.raises(EngineUnavailableError):
                await collect(client, request(100))
            await eventually(lambda: client.state() is EngineState.READY)
            assert client.pid != first
            assert tokens_of(await collect(client, request(101))) == [102, 103, 104, 105, 106]
            assert "spark_engine_restarts_total 1.0" in client.metrics.render()[0].decode()

    run(body)


def test_sigkill_ends_every_stream_at_once() -> None:
    async def body() -> None:
        async with engine("step_ms=5", backoff=(0.3,)) as client:
            tasks = [
                asyncio.create_task(collect(client, request(n, tokens=100_000)))
                for n in range(1, 33)
            ]
            await asyncio.sleep(0.1)
            assert client.pid is not None
            began = time.monotonic()
            os.kill(client.pid, signal.SIGKILL)
            assert all(
                d[-1].finish_reason is FinishReason.ERROR for d in await asyncio.gather(*tasks)
            )
            assert time.monotonic() - began < 1
            assert client.stats() is None
            assert client.state() is EngineState.DEAD
            await eventually(lambda: client.state() is EngineState.READY)
            assert len(await collect(client, request(200))) == 5

    run(body)


def test_backoff_grows_with_each_failure_in_a_row() -> None:
    async def body() -> None:
        async with engine(backoff=(0.1, 0.4, 0.8)) as client:
            waits = []
            for number in range(3):
                assert client.pid is not None
                os.kill(client.pid, signal.SIGKILL)
                await eventually(lambda: client.state() is EngineState.DEAD)
                waits.append(await eventually(lambda: client.state() is EngineState.LOADING))
                with pytest.raises(EngineUnavailableError, match="loading"):
                    await collect(client, request(number + 1))
                await eventually(lambda: client.state() is EngineState.READY)
            assert waits[0] < 0.35 < waits[1] < 0.75 < waits[2]

    run(body)


def test_a_frozen_engine_is_found_ended_and_replaced() -> None:
    async def body() -> None:
        async with engine("step_ms=5", stuck=2.0) as client:
            tasks = [
                asyncio.create_task(collect(client, request(n, tokens=100_000)))
                for n in range(1, 9)
            ]
            await asyncio.sleep(0.1)
            assert client.pid is not None
            began = time.monotonic()
            os.kill(client.pid, signal.SIGSTOP)
            await eventually(lambda: client.state() is EngineState.STUCK)
            assert client.age() >= 1.0
            with pytest.raises(EngineUnavailableError, match="no progress"):
                await collect(client, request(50))
            assert all(
                d[-1].finish_reason is FinishReason.ERROR for d in await asyncio.gather(*tasks)
            )
            assert 1.9 < time.monotonic() - began < 4
            await eventually(lambda: client.state() is EngineState.READY)
            assert len(await collect(client, request(60))) == 5

    run(body)


def test_an_idle_engine_that_freezes_is_replaced_before_anybody_waits() -> None:
    async def body() -> None:
        async with engine(stuck=1.0) as client:
            first = client.pid
            assert first is not None
            os.kill(first, signal.SIGSTOP)
            await eventually(lambda: client.pid not in (first, None))
            await eventually(lambda: client.state() is EngineState.READY)

    run(body)


def test_a_hanging_step_is_stuck_but_a_computing_step_is_not() -> None:
    async def body() -> None:
        async with engine(stuck=1.0) as client:
            first = client.pid
            deltas = await collect(client, request(1, COMPUTE, 3, tokens=1))
            assert deltas[-1].finish_reason is FinishReason.LENGTH
            assert client.pid == first
            began = time.monotonic()
            deltas = await collect(client, request(2, HANG))
            assert deltas[-1].finish_reason is FinishReason.ERROR
            assert time.monotonic() - began < 4

    run(body)


def test_idle_is_never_stuck() -> None:
    async def body() -> None:
        async with engine(stuck=1.0) as client:
            first = client.pid
            await asyncio.sleep(2.2)
            assert client.state() is EngineState.READY
            assert client.pid == first

    run(body)


def test_a_slow_consumer_is_not_a_stuck_engine() -> None:
    async def body() -> None:
        async with engine(stuck=1.0) as client:
            first = client.pid
            stream = client.generate(request(1, tokens=3))
            await anext(stream)
            await asyncio.sleep(1.6)
            assert (client.state(), client.pid) == (EngineState.READY, first)
            rest = [delta async for delta in stream]
            assert rest[-1].finish_reason is FinishReason.LENGTH

    run(body)


def test_a_stalled_event_loop_does_not_end_the_engine() -> None:
    async def body() -> None:
        async with engine("step_ms=5", stuck=1.0) as client:
            first = client.pid
            task = asyncio.create_task(collect(client, request(1, tokens=700)))
            await asyncio.sleep(0.1)
            time.sleep(2.5)
            assert (await task)[-1].finish_reason is FinishReason.LENGTH
            assert client.pid == first

    run(body)


def test_drain_lets_running_requests_finish_and_admits_none() -> None:
    async def body() -> None:
        async with engine("step_ms=10") as client:
            task = asyncio.create_task(collect(client, request(1, tokens=50)))
            await asyncio.sleep(0.1)
            ending = asyncio.create_task(client.shutdown(20))
            await asyncio.sleep(0)
            assert client.state() is EngineState.DRAINING
            with pytest.raises(EngineUnavailableError, match="shutting down"):
                await collect(client, request(2))
            assert (await task)[-1].finish_reason is FinishReason.LENGTH
            assert await ending == 0
            assert client.state() is EngineState.DEAD

    run(body)


def test_drain_ends_what_takes_too_long() -> None:
    async def body() -> None:
        async with engine("step_ms=10") as client:
            tasks = [
                asyncio.create_task(collect(client, request(n, tokens=100_000))) for n in (1, 2)
            ]
            await asyncio.sleep(0.1)
            began = time.monotonic()
            assert await client.shutdown(0.3) == 2
            assert time.monotonic() - began < 2
            for deltas in await asyncio.gather(*tasks):
                assert deltas[-1].finish_reason is FinishReason.ERROR
                assert "shutting down" in (deltas[-1].error or "")

    run(body)


def test_a_frozen_engine_does_not_hold_up_the_end() -> None:
    async def body() -> None:
        async with engine() as client:
            assert client.pid is not None
            os.kill(client.pid, signal.SIGSTOP)
            began = time.monotonic()
            await client.shutdown(1)
            assert time.monotonic() - began < 6

    run(body)


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ("start=config", 2, "use 8"),
        ("start=fit", 2, "exceeds the budget of 1 GiB"),
        ("start=bug", 1, "ZeroDivisionError: a bug"),
        ("start=exit", 1, "exit code 7"),
    ],
)
def test_a_start_that_fails_is_not_retried(options: str, code: int, words: str) -> None:
    async def body() -> None:
        client = ProcessEngineClient(launch(options), backoff=(0.01,))
        await client.start()
        await asyncio.wait_for(client.ready(), 20)
        fatal = client.fatal.result()
        assert fatal.exit_code == code
        assert words in fatal.message
        assert client.state() is EngineState.DEAD
        assert client.info() is None
        await asyncio.sleep(0.1)
        assert client.pid is None, "no second try"
        await client.shutdown(0)

    run(body)


def test_a_restart_that_fails_for_the_users_reason_is_fatal(tmp_path: Path) -> None:
    async def body() -> None:
        async with engine(f"start=once&marker={tmp_path / 'marker'}") as client:
            assert client.pid is not None
            os.kill(client.pid, signal.SIGKILL)
            fatal = await asyncio.wait_for(asyncio.shield(client.fatal), 10)
            assert (fatal.message, fatal.exit_code) == ("the model has gone", 2)

    run(body)


def test_loading_is_not_ready() -> None:
    async def body() -> None:
        client = ProcessEngineClient(launch("start_s=1"))
        client.spawn()
        await client.start()
        assert client.state() is EngineState.LOADING
        with pytest.raises(EngineUnavailableError, match="loading"):
            await collect(client, request(1))
        await asyncio.wait_for(client.ready(), 20)
        assert client.state() is EngineState.READY
        await client.shutdown(0)

    run(body)


def test_the_engine_ignores_the_terminals_signals() -> None:
    async def body() -> None:
        async with engine("step_ms=5") as client:
            task = asyncio.create_task(collect(client, request(1, tokens=40)))
            await asyncio.sleep(0.05)
            assert client.pid is not None
            os.kill(client.pid, signal.SIGINT)
            os.kill(client.pid, signal.SIGTERM)
            assert (await task)[-1].finish_reason is FinishReason.LENGTH

    run(body)


def test_the_engine_ends_when_its_parent_is_killed() -> None:
    code = (
        "import asyncio, sys, time\n"
        "from tests.spark_server.test_engine_client import launch, ProcessEngineClient\n"
        "async def main():\n"
        "    client = ProcessEngineClient(launch())\n"
        "    await client.start(); await client.ready()\n"
        "    print(client.pid, client._link._folder, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=REPO
    ) as parent:
        assert parent.stdout is not None
        pid, folder = parent.stdout.readline().split()
        engine_process = psutil.Process(int(pid))
        assert Path(folder).is_dir()
        parent.kill()
        assert engine_process.wait(5) is None or not engine_process.is_running()
        assert not Path(folder).exists(), "the endpoints are removed too"


def test_the_watcher_costs_little_per_delta() -> None:
    """One decode per step for all streams: the bound is generous, a decode each breaks it."""

    async def body() -> None:
        async with engine("step_ms=2", max_batch_size=64) as client:
            best = float("inf")
            for part in range(3):  # the least of three: whatever else runs here is counted too
                before = time.process_time()
                ids = range(64 * part + 1, 64 * part + 65)
                done = await asyncio.gather(*(collect(client, request(n, tokens=100)) for n in ids))
                best = min(best, (time.process_time() - before) / sum(map(len, done)))
            print(f"{best * 1e6:.1f} us a delta")
            assert best < 50e-6

    run(body)
