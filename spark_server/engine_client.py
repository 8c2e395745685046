"""Where the API sends requests: streams over the engine process, which is watched and restarted.

Implements `engine_api.EngineClient`; knows nothing of HTTP, text or tensors.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import EngineUnavailableError, QueueFullError, RequestError, SparkError
from engine.request import EngineStats, GenerationRequest, TokenDelta
from spark_server.engine_api import EngineState, ModelInfo
from spark_server.engine_link import EngineLink
from spark_server.engine_progress import ProgressClock
from spark_server.engine_streams import Stream, Streams
from spark_server.metrics import Metrics
from spark_server.wire import (
    Abort,
    Event,
    Failed,
    Heartbeat,
    Launch,
    Note,
    Phase,
    Ready,
    Rejected,
    StepReport,
    Stop,
    Submit,
)

BACKOFF_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
WATCH_SECONDS = 0.5
# An engine that served this long was healthy: its end starts the back-off from the beginning.
HEALTHY_SECONDS = 60.0
_STOP_SECONDS = 3.0

_UNAVAILABLE = {
    EngineState.LOADING: "the engine is loading; try again later",
    EngineState.READY: "the engine is being restarted; try again later",
    EngineState.DRAINING: "the server is shutting down",
    EngineState.DEAD: "the engine has ended and is about to be restarted; try again later",
    EngineState.STUCK: "the engine makes no progress; try again later",
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Fatal:
    """Why the server must end, and its exit code: 2 a user's mistake, 1 ours."""

    message: str
    exit_code: int


class ProcessEngineClient:
    """The engine in its own process. All methods run on one event loop, but for `spawn`.

    Args:
        launch: what to run, endpoints left empty.
        stuck_timeout: seconds without progress after which the engine is ended and restarted.
        metrics: where engine gauges, state and restarts are recorded.
        backoff: seconds to wait before the first, second, ... restart in a row.
        on_ready: called whenever an engine process has become ready.

    Attributes:
        starts: how many engine processes were started.
        phases: name, seconds and detail of each phase of the last start, as far as it came.
    """

    def __init__(
        self,
        launch: Launch,
        *,
        stuck_timeout: float = 20.0,
        metrics: Metrics | None = None,
        backoff: tuple[float, ...] = BACKOFF_SECONDS,
        on_ready: Callable[[Ready], None] | None = None,
    ) -> None:
        self._launch = launch
        self._stuck_timeout = stuck_timeout
        self.metrics = metrics or Metrics()
        self._backoff = backoff
        self._on_ready = on_ready
        self._link: EngineLink | None = None
        self._ended: tuple[EngineLink, int] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._fatal: asyncio.Future[Fatal] | None = None
        self._ready_event = asyncio.Event()
        self._phase = EngineState.LOADING
        self._closing = False
        self._streams = Streams()
        self._failures = 0
        self.starts = 0
        self.phases: list[tuple[str, float, str]] = []
        self._ever_ready = False
        self._ready_at = 0.0
        self._failed: Failed | None = None
        self._info: ModelInfo | None = None
        self._ledger: Mapping[str, object] | None = None
        self._stats: EngineStats | None = None
        self._clock = ProgressClock(stuck_timeout, time.monotonic())

    # -- life -----------------------------------------------------------------------------------

    def spawn(self) -> None:
        """Start the engine process; may be called before the event loop runs, to save time."""
        self._failed = None
        self.starts += 1
        self.phases = []
        self._clock = ProgressClock(self._stuck_timeout, time.monotonic())
        self._link = EngineLink(self._launch, self._on_exit)

    async def start(self) -> None:
        """Begin to listen and to watch; spawns unless that was done before."""
        self._loop = asyncio.get_running_loop()
        self._fatal = self._loop.create_future()
        if self._link is None:
            self.spawn()
        self._listen()
        self._watcher = asyncio.create_task(self._watch(), name="engine-watch")

    def _listen(self) -> None:
        assert self._loop is not None
        assert self._link is not None
        self._loop.add_reader(self._link.fileno(), self._read, self._link)
        if self._ended is not None and self._ended[0] is self._link:
            self._loop.call_soon(self._lost, *self._ended)
        self._loop.call_soon(self._read, self._link)

    def _on_exit(self, link: EngineLink, code: int) -> None:
        """Runs on the waiting thread of the link."""
        self._ended = (link, code)
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody cares any more
                self._loop.call_soon_threadsafe(self._lost, link, code)

    async def ready(self) -> None:
        """Wait until the engine takes work, or until `fatal` says that it never will."""
        assert self._fatal is not None
        waiter = asyncio.create_task(self._ready_event.wait())
        either: list[asyncio.Future[Any]] = [waiter, self._fatal]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        waiter.cancel()

    @property
    def fatal(self) -> asyncio.Future[Fatal]:
        """Done when the engine cannot be served again; the server should end."""
        assert self._fatal is not None
        return self._fatal

    @property
    def pid(self) -> int | None:
        """Process id of the engine that runs now."""
        return None if self._link is None else self._link.pid

    def abandon(self) -> None:
        """End an engine that was spawned before there was an event loop."""
        self._closing = True
        if self._link is not None:
            self._link.kill()
            self._link.wait(_STOP_SECONDS)
            self._close_link()

    async def idle(self) -> None:
        """Wait until no consumer reads a stream."""
        await self._streams.none_open()

    def drain(self) -> None:
        """Admit nothing from now on; what runs goes on."""
        if self._phase is not EngineState.DEAD:
            self._phase = EngineState.DRAINING
        self._closing = True

    async def shutdown(self, drain_timeout: float) -> int:
        """Drain for `drain_timeout` seconds, end the rest with an error, end the engine.

        Returns:
            How many sequences had to be ended.
        """
        self.drain()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.idle(), drain_timeout)
        left = self._streams.fail_all("the server is shutting down; send the request again later")
        if self._watcher is not None:
            self._watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watcher
        await self._end_link()
        self._phase = EngineState.DEAD
        return len(left)

    async def _end_link(self) -> None:
        link = self._link
        if link is None:
            return
        link.send(Stop())
        if not await asyncio.to_thread(link.wait, _STOP_SECONDS):
            link.kill()
            await asyncio.to_thread(link.wait, _STOP_SECONDS)
        self._close_link()

    def _close_link(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            if self._loop is not None:
                self._loop.remove_reader(link.fileno())
            link.close()

    # -- what the engine says -------------------------------------------------------------------

    def _read(self, link: EngineLink) -> None:
        if link is self._link:
            for event in link.receive():
                self._take(event)

    def _take(self, event: Event) -> None:
        now = time.monotonic()
        self._clock.heard(now)
        match event:
            case StepReport(deltas, stats, stepped):
                self._stats = stats
                self.metrics.on_step(stats, stepped)
                self._clock.report(event, now)
                for delta in deltas:
                    self._streams.deliver(delta)
            case Heartbeat():
                self.metrics.on_heartbeat(event.cpu_seconds, event.resident, event.peak)
                self._clock.beat(event, now)
            case Rejected():
                self._streams.reject(event.request_id, _rejection(event))
            case Note(text):
                logger.info("%s", text)
            case Phase(name, seconds, detail):
                self.metrics.on_phase(name, seconds)
                self.phases.append((name, seconds, detail))
                logger.debug("Start: %s took %.2f s%s", name, seconds, detail and f", {detail}")
            case Failed():
                self._failed = event
            case Ready():
                self._become_ready(event)

    def _become_ready(self, ready: Ready) -> None:
        self._info, self._ledger, self._stats = ready.info, ready.ledger, ready.stats
        self._ever_ready = True
        self._ready_at = time.monotonic()
        self.metrics.on_ready(ready.info, _terms(ready.ledger), ready.stats)
        if not self._closing:
            self._phase = EngineState.READY
            self._publish_state()
            self._ready_event.set()
            if self._on_ready is not None:
                self._on_ready(ready)

    # -- death and restart ----------------------------------------------------------------------

    def _lost(self, link: EngineLink, code: int) -> None:
        """The engine process has ended, for whatever reason."""
        if link is not self._link:
            return
        self._read(link)  # what it said last, e.g. why it failed
        failed = self._failed
        self._close_link()
        self._ready_event.clear()
        self._stats = None
        self.metrics.on_engine_lost()
        self._phase = EngineState.DEAD
        self._publish_state()
        reason = failed.message if failed else _exit_text(code)
        failed_ids = self._streams.fail_all("the engine ended unexpectedly; send the request again")
        if self._closing:
            return
        assert self._fatal is not None
        if failed is not None and failed.user:
            self._give_up(Fatal(reason, 2))
        elif not self._ever_ready:
            self._give_up(Fatal(f"the engine did not start: {reason}", 1))
        else:
            if time.monotonic() - self._ready_at > HEALTHY_SECONDS:
                self._failures = 0
            self._restart_later(f"ended ({reason}) with {len(failed_ids)} requests")

    def _restart_later(self, what: str) -> None:
        wait = self._backoff[min(self._failures, len(self._backoff) - 1)]
        self._failures += 1
        logger.error("The engine %s; it is started anew in %g s", what, wait)
        assert self._loop is not None
        self._loop.call_later(wait, self._restart)

    def _give_up(self, fatal: Fatal) -> None:
        if not self.fatal.done():
            self.fatal.set_result(fatal)

    def _restart(self) -> None:
        if self._closing:
            return
        self.metrics.on_restart()
        self._phase = EngineState.LOADING
        self._publish_state()
        try:
            self.spawn()
        except OSError as error:
            self._phase = EngineState.DEAD
            self._restart_later(f"could not be started ({error})")
            return
        self._listen()

    # -- watching -------------------------------------------------------------------------------

    async def _watch(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            now = time.monotonic()
            late = now - last - WATCH_SECONDS
            if late > WATCH_SECONDS:
                # This process itself stood still (stopped, or a busy loop): not the engine's fault.
                self._clock.own_pause(late)
            last = now
            if self._link is not None:
                self._read(self._link)
            self._publish_state()
            self._kill_when_stuck()

    def _kill_when_stuck(self) -> None:
        now = time.monotonic()
        loading = self._phase is EngineState.LOADING
        working = self._streams.owed > 0
        if self._link is None or not self._clock.stuck(now, loading=loading, working=working):
            return
        logger.error(
            "The engine made no progress for %.1f s with %d requests; it is ended",
            max(self._clock.silence(now), self.age()),
            self._streams.owed,
        )
        self._link.kill()
        # Otherwise it would be found again before its exit is seen.
        self._clock = ProgressClock(self._stuck_timeout, now)

    def _publish_state(self) -> None:
        self.metrics.on_state(self.state(), self.age())

    # -- EngineClient ---------------------------------------------------------------------------

    def state(self) -> EngineState:
        """What the engine is doing now; half the stuck-timeout without progress is STUCK."""
        if self._phase is EngineState.READY and self.age() >= self._stuck_timeout / 2:
            return EngineState.STUCK
        return self._phase

    def age(self) -> float:
        """Seconds without progress while work is running; 0 when idle."""
        return self._clock.age(time.monotonic()) if self._streams.owed else 0.0

    def stats(self) -> EngineStats | None:
        """Gauges of the last step, or None while no engine runs."""
        return self._stats

    def ledger(self) -> Mapping[str, object] | None:
        """The memory ledger as JSON values, or None before the first start is done."""
        return self._ledger

    def info(self) -> ModelInfo | None:
        """The loaded model, or None before the first start is done."""
        return self._info

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenDelta, None]:
        """Stream what the request produces; closing the generator aborts the request."""
        queue = self._open(request)
        try:
            while True:
                item = await queue.get()
                if isinstance(item, SparkError):
                    raise item
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            if self._streams.close(request.request_id) and self._link is not None:
                self._link.send(Abort(request.request_id))

    def _open(self, request: GenerationRequest) -> Stream:
        state = self.state()
        if state is not EngineState.READY or self._link is None or self._info is None:
            raise EngineUnavailableError(_UNAVAILABLE[state])
        capacity = self._info.max_batch_size + self._info.max_waiting
        if self._streams.owed >= capacity:
            raise QueueFullError(
                f"{self._streams.owed} sequences are running or waiting, "
                f"the server takes {capacity}; try again in a second"
            )
        if not self._streams.owed:
            self._clock.work_begins(time.monotonic())
        queue = self._streams.open(request.request_id)
        if not self._link.send(Submit(request)):
            self._streams.close(request.request_id)
            raise EngineUnavailableError(_UNAVAILABLE[EngineState.DEAD])
        return queue


def _rejection(event: Rejected) -> RequestError:
    if event.retry_after is not None:
        return QueueFullError(event.message, retry_after=event.retry_after)
    return RequestError(event.message, param=event.param, code=event.code, status=event.status)


def _exit_text(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _terms(ledger: Mapping[str, object]) -> list[tuple[str, str, int]]:
    """Name, kind and bytes of each term, for the metrics."""
    terms = ledger.get("terms")
    if not isinstance(terms, list):
        return []
    return [(str(t["name"]), str(t["kind"]), int(t["bytes"])) for t in terms]
