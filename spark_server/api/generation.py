"""Runs the sequences of one HTTP request in the engine and accounts for them.

Knows the engine and the text machine, not the form of the answer. Closing a generator of this
module, or cancelling the task that reads it, aborts its sequences in the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

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

    `token_ids` and `logprobs` are empty unless log-probabilities were asked for.
    """

    index: int
    pieces: Sequence[Piece]
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    finish: str | None = None


@dataclass(slots=True)
class ChoiceRun:
    """One sequence: its request, its text machine, and the numbers that are told afterwards.

    Times in seconds; `began` is a monotonic time, that of the HTTP request.
    """

    index: int
    request: GenerationRequest
    reply: Reply
    began: float
    first_token: float | None = None
    ended: float | None = None
    stats: RequestStats | None = None
    _last: float = field(default=0.0, repr=False)

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
    fed = run.reply.feed(delta.token_ids, hidden_last=delta.stop_token_id is not None)
    run.count(observer, fed.consumed)
    ends = fed.done or delta.finish_reason is not None
    pieces, finish = fed.pieces, None
    if ends:
        tail, finish = run.reply.finish(
            cut=delta.finish_reason is FinishReason.LENGTH and not fed.done
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
    return result, ends


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
                if result.pieces or result.logprobs:
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
        observer.on_finish(
            key, outcome, run.prompt_tokens, run.completion_tokens, seconds, run.stats
        )


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
