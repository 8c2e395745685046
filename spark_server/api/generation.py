"""Runs the sequences of one HTTP request in the engine and accounts for them.

Knows the engine and the text machine, not the form of the answer. Closing a generator of this
module, or cancelling the task that reads it, aborts its sequences in the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from engine.errors import EngineUnavailableError, RequestError
from engine.request import (
    FinishReason,
    GenerationRequest,
    RequestStats,
    TokenDelta,
    TokenLogprobs,
)
from spark_server.api.errors import EngineFailureError
from spark_server.engine_api import Endpoint, EngineClient, Outcome, RequestObserver
from spark_server.text.reply import Piece, Reply


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What one delta of the engine gave one choice; `finish` is set on its last.

    `token_ids` and `logprobs` are empty unless log-probabilities were asked for. `restart`: all
    that the choice gave before does not count, this delta holds what is left of it.
    """

    index: int
    pieces: Sequence[Piece]
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    finish: str | None = None
    restart: bool = False


@dataclass(slots=True)
class ChoiceRun:
    """One sequence: its request, its text machine, and the numbers that are told afterwards.

    Times in seconds; `began` is a monotonic time, that of the HTTP request. `make_reply` makes the
    machine, and another one when the engine takes tokens back.
    """

    index: int
    request: GenerationRequest
    make_reply: Callable[[], Reply]
    began: float
    reply: Reply = field(init=False)
    first_token: float | None = None
    ended: float | None = None
    stats: RequestStats | None = None
    retracted: int = 0
    _last: float = field(default=0.0, repr=False)
    _ids: list[int] = field(default_factory=list, repr=False)
    _logprobs: list[TokenLogprobs] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        self.reply = self.make_reply()

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def completion_tokens(self) -> int:
        """Tokens generated, the stop id included."""
        return self.reply.tokens

    def count(self, observer: RequestObserver, tokens: int) -> None:
        """Tell the observer about `tokens` new tokens."""
        if tokens == 0:
            return
        now = time.monotonic()
        key = self.request.request_id
        if self.first_token is None:
            self.first_token = now - self.began
            observer.on_first_token(key, self.first_token)
            if tokens > 1:
                observer.on_tokens(key, tokens - 1, 0.0)
        else:
            observer.on_tokens(key, tokens, now - self._last)
        self._last = now

    def keep(self, delta: TokenDelta, consumed: int) -> None:
        """Remember what may be taken back."""
        if self.request.retractable:
            self._ids.extend(delta.token_ids[:consumed])
            self._logprobs.extend(delta.logprobs[:consumed])

    def retract(self, count: int) -> ChoiceDelta:
        """Take the last `count` tokens back; returns all that is left, as one delta."""
        kept = len(self._ids) - count
        if kept < 0:
            raise EngineFailureError("the engine took back more than it gave", 500)
        self.retracted += count
        del self._ids[kept:]
        del self._logprobs[kept:]
        self.reply = self.make_reply()
        pieces = self.reply.feed(self._ids).pieces
        ids = list(self._ids) if self._logprobs else []
        return ChoiceDelta(self.index, pieces, ids, list(self._logprobs), restart=True)


def _take(run: ChoiceRun, delta: TokenDelta, observer: RequestObserver) -> tuple[ChoiceDelta, bool]:
    """Feed one delta to the choice's machine; the second result says whether the choice ends."""
    if delta.stats is not None:
        run.stats = delta.stats
    if delta.finish_reason is FinishReason.ERROR and delta.error_status < 500:
        raise RequestError(
            delta.error or "the request cannot be served",
            param=delta.error_param,
            code=delta.error_code,
            status=delta.error_status,
        )
    if delta.finish_reason is FinishReason.ERROR:
        raise EngineFailureError(delta.error or "the engine failed", delta.error_status)
    if delta.finish_reason is FinishReason.ABORT:
        raise EngineFailureError(delta.error or "the server ended the request", 503)
    left = run.retract(delta.retract) if delta.retract else None
    hidden_last = delta.stop_token_id is not None
    fed = run.reply.feed(delta.token_ids, hidden_last=hidden_last)
    run.count(observer, fed.consumed)
    run.keep(delta, fed.consumed)
    ends = fed.done or delta.finish_reason is not None
    pieces, finish = fed.pieces, None
    if ends:
        reason = None if fed.done else delta.finish_reason
        tail, finish = run.reply.finish(
            cut=reason is FinishReason.LENGTH,
            broken_off=reason is FinishReason.STOP and not hidden_last,
        )
        pieces = pieces + tail
    wants = bool(delta.logprobs)
    result = ChoiceDelta(
        index=run.index,
        pieces=pieces,
        token_ids=delta.token_ids[: fed.consumed] if wants else (),
        logprobs=delta.logprobs[: fed.consumed],
        finish=finish,
    )
    return result if left is None else _joined(left, result), ends


def _joined(left: ChoiceDelta, new: ChoiceDelta) -> ChoiceDelta:
    """What is left after tokens were taken back, and what came in the same delta."""
    return replace(
        left,
        pieces=[*left.pieces, *new.pieces],
        token_ids=[*left.token_ids, *new.token_ids],
        logprobs=[*left.logprobs, *new.logprobs],
        finish=new.finish,
    )


async def run_choice(
    run: ChoiceRun,
    engine: EngineClient,
    observer: RequestObserver,
    endpoint: Endpoint,
    streaming: bool,
) -> AsyncGenerator[ChoiceDelta, None]:
    """Generate one choice; the last delta has `finish`.

    Raises:
        RequestError, EngineUnavailableError: the engine did not take the request.
        EngineFailureError: it took it and failed.
    """
    key = run.request.request_id
    outcome = Outcome.ABORT
    observer.on_start(key, endpoint, streaming)
    try:
        async with aclosing(engine.generate(run.request)) as deltas:
            async for delta in deltas:
                result, ends = _take(run, delta, observer)
                if ends:
                    outcome = Outcome(result.finish or Outcome.STOP)
                    run.ended = time.monotonic() - run.began
                    yield result
                    return
                if result.pieces or result.logprobs or result.restart:
                    yield result
        raise EngineFailureError("the engine ended the request without a reason")
    except RequestError:
        outcome = Outcome.REJECTED
        raise
    except EngineUnavailableError:
        outcome = Outcome.UNAVAILABLE
        raise
    except Exception:
        outcome = Outcome.ERROR
        raise
    finally:
        seconds = time.monotonic() - run.began
        tokens = run.completion_tokens + run.retracted
        observer.on_finish(key, outcome, run.prompt_tokens, tokens, seconds, run.stats)


Start = Callable[[ChoiceRun], AsyncGenerator[ChoiceDelta, None]]


async def run_all(runs: Sequence[ChoiceRun], start: Start) -> AsyncGenerator[ChoiceDelta, None]:
    """The deltas of all choices as they come; the first error ends them all.

    Args:
        start: makes the generator of one choice.
    """
    if len(runs) == 1:  # no task and no queue for the common case
        async with aclosing(start(runs[0])) as deltas:
            async for delta in deltas:
                yield delta
        return
    queue: asyncio.Queue[ChoiceDelta | BaseException] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(start(run), queue)) for run in runs]
    try:
        open_choices = len(runs)
        while open_choices:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            open_choices -= item.finish is not None
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    deltas: AsyncGenerator[ChoiceDelta, None], queue: asyncio.Queue[ChoiceDelta | BaseException]
) -> None:
    async with aclosing(deltas):
        try:
            async for delta in deltas:
                queue.put_nowait(delta)
        except Exception as error:
            queue.put_nowait(error)
