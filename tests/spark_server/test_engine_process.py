"""The engine's loop and its known-answer step, inside this process."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import zmq

from engine.config import EngineConfig
from engine.errors import InvariantError
from engine.request import FinishReason, GenerationRequest, SamplingParams, TokenDelta
from spark_server.engine_process import StepClock, known_answer, run
from spark_server.wire import (
    Abort,
    Command,
    Event,
    Failed,
    Launch,
    Phase,
    Ready,
    Rejected,
    StepReport,
    Stop,
    Submit,
    decode_event,
    encode,
)
from tests.spark_server.fake_core import REFUSE, VOCAB, FakeCore

CONFIG = EngineConfig("fake", device="cpu", dtype="float32", memory_budget=2**20)
FACTORY = "tests.spark_server.fake_core:build"


class Loop:
    """`run` on a thread, with an in-process socket and a list of what it sent."""

    def __init__(
        self,
        config: EngineConfig = CONFIG,
        factory: str = FACTORY,
        clock: StepClock | None = None,
    ) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.push = self.context.socket(zmq.PUSH)
        self.push.bind("inproc://commands")
        self.pull = self.context.socket(zmq.PULL)
        self.pull.connect("inproc://commands")
        self.events: list[Event] = []
        self.code: int | None = None
        self.clock = clock or StepClock()
        self.launch = Launch(factory, "", "", config, "fake")
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        # Through the wire and back, as the API process sees it.
        self.code = run(
            self.launch,
            self.pull,
            lambda event: self.events.append(decode_event(encode(event))),
            self.clock,
        )

    def send(self, *commands: Command) -> None:
        for command in commands:
            self.push.send(encode(command))

    def end(self) -> int | None:
        self.thread.join(10)
        assert not self.thread.is_alive()
        self.push.close()
        self.pull.close()
        self.context.term()
        return self.code

    def reports(self) -> list[StepReport]:
        return [event for event in self.events if isinstance(event, StepReport)]


@pytest.fixture
def loop() -> Iterator[Loop]:
    running = Loop()
    yield running
    if running.thread.is_alive():
        running.send(Stop())
    running.end()


def request(number: int, *prompt: int, tokens: int = 3) -> GenerationRequest:
    return GenerationRequest(number, prompt, SamplingParams(max_tokens=tokens))


def test_ready_comes_after_the_phases_and_stop_ends_the_loop(loop: Loop) -> None:
    loop.send(Stop())
    loop.thread.join(10)
    assert loop.code == 0
    kinds = [type(event) for event in loop.events]
    assert kinds.index(Ready) > kinds.index(Phase)
    ready = next(event for event in loop.events if isinstance(event, Ready))
    assert ready.info.max_waiting == CONFIG.max_waiting
    assert ready.ledger["total_bytes"] == 1024


def test_the_peak_of_memory_is_logged_after_the_start_and_when_idle_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    peaks = [1000, 1000, 1020, 1040]
    monkeypatch.setattr("engine.reserve.peak.peak_resident", lambda: peaks.pop(0))
    clock = StepClock()
    assert clock.peak() == 0
    with caplog.at_level(logging.INFO, "engine.reserve.peak"):
        loop = Loop(clock=clock)
        for number in range(3):
            loop.send(Submit(request(number, 10, tokens=2)))
            while len(loop.reports()) < 2 * (number + 1):
                time.sleep(0.001)
        loop.send(Stop())
        assert loop.end() == 0
    said = [r.getMessage() for r in caplog.records if r.name == "engine.reserve.peak"]
    assert said == [
        "Peak memory: 1000 B resident, 1.0 KiB planned, 24 B less",
        "Peak memory: 1020 B resident, 1.0 KiB planned, 4 B less",
        "Peak memory: 1.0 KiB resident, 1.0 KiB planned, 16 B more",
    ]
    peaks.append(7)
    assert clock.peak() == 7


def test_reports_in_order_and_an_idle_report_after_an_abort(loop: Loop) -> None:
    loop.send(Submit(request(1, 10, tokens=4)))
    while len(loop.reports()) < 4:
        time.sleep(0.001)
    loop.send(Submit(request(2, REFUSE)))
    while loop.reports()[-1].stepped is not False:
        time.sleep(0.001)
    loop.send(Submit(request(3, 5, tokens=100_000_000)))
    while loop.reports()[-1].stats.running != 1:
        time.sleep(0.001)
    loop.send(Abort(3))
    while loop.reports()[-1].stats.running:
        time.sleep(0.001)
    loop.send(Stop())
    loop.thread.join(10)
    tokens = [d.token_ids[0] for r in loop.reports() for d in r.deltas if d.request_id == 1]
    assert tokens == [11, 12, 13, 14]
    assert loop.reports()[-1].stepped is False
    rejected = [event for event in loop.events if isinstance(event, Rejected)]
    assert [(r.request_id, r.param, r.status) for r in rejected] == [(2, "prompt", 400)]
    assert loop.code == 0


@pytest.mark.parametrize(
    ("query", "code", "user"), [("start=config", 2, True), ("start=bug", 1, False)]
)
def test_a_failed_start_is_reported(
    query: str, code: int, user: bool, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(replace(CONFIG, model_dir=f"fake?{query}"))
    assert loop.end() == code
    failed = loop.events[-1]
    assert isinstance(failed, Failed)
    assert failed.user is user


class Slow(FakeCore):
    """Takes its time over the drafts of the next step."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.reports_at: list[int] = []
        self.loop: Loop | None = None

    def prepare(self) -> None:
        assert self.loop is not None
        self.reports_at.append(len(self.loop.reports()))


def test_tokens_are_sent_before_the_next_drafts_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    cores: list[Slow] = []

    def core(*args: Any) -> Slow:
        cores.append(Slow(*args))
        return cores[0]

    monkeypatch.setattr("tests.spark_server.fake_core.FakeCore", core)
    loop = Loop()
    while not cores:
        time.sleep(0.001)
    cores[0].loop = loop
    loop.send(Submit(request(1, 10, tokens=4)))
    while len(loop.reports()) < 4:
        time.sleep(0.001)
    loop.send(Stop())
    assert loop.end() == 0
    assert cores[0].reports_at == [1, 2, 3, 4]


class Scripted(FakeCore):
    """Answers the known-answer step with what the test says."""

    def __init__(self, *answers: Sequence[int], reason: FinishReason = FinishReason.LENGTH) -> None:
        super().__init__(CONFIG, 0)
        self.answers = list(answers)
        self.reason = reason

    def step(self) -> list[TokenDelta]:
        (sequence,) = self.waiting
        if not self.answers:
            return []
        self.waiting.clear()
        tokens = tuple(self.answers.pop(0))
        return [TokenDelta(sequence.request.request_id, tokens, finish_reason=self.reason)]


def test_the_known_answer_is_asked_twice() -> None:
    assert known_answer(FakeCore(CONFIG, 0), VOCAB) == (16, 17, 18, 19)
    assert known_answer(Scripted((1, 2), (1, 2)), VOCAB) == (1, 2)


@pytest.mark.parametrize(
    ("core", "words"),
    [
        (Scripted((1, 2), (1, 3)), r"\(1, 2\), then \(1, 3\)"),
        (Scripted((), ()), "gave"),
        (Scripted((VOCAB,), (VOCAB,)), "vocabulary of 512"),
        (Scripted((-1,), (-1,)), "vocabulary of 512"),
        (Scripted((1,), reason=FinishReason.ERROR), "ended with error"),
        (Scripted(), "did not end within 64 steps"),
    ],
)
def test_a_wrong_known_answer_refuses_to_serve(core: Scripted, words: str) -> None:
    with pytest.raises(InvariantError, match=words):
        known_answer(core, VOCAB)
