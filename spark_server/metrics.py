"""What is measured, in a registry of its own: requests, tokens, latencies, engine gauges, ledger.

Labels come from closed sets only; knows nothing of HTTP bodies, prompts or keys.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
)
from prometheus_client.exposition import choose_encoder

from engine.request import EngineStats, RequestStats
from spark_server.engine_api import Endpoint, EngineState, ModelInfo, Outcome
from spark_server.engine_metrics import ENGINE_NAMES, EngineCollector
from spark_server.prefix_cache_metrics import PREFIX_CACHE_NAMES, PrefixCacheCollector
from spark_server.process_metrics import PROCESS_NAMES, ProcessCollector
from spark_server.speculation_metrics import SPECULATION_NAMES, SpeculationCollector
from spark_server.version import version
from spark_server.watchdog_metrics import WATCHDOG_NAMES, WatchdogCollector

P = ParamSpec("P")
R = TypeVar("R")

_TTFT = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_INTER_TOKEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1, 5)
_REQUEST = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_QUEUE = (0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 120)
_STEP = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 30)
_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)

_METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE"})
_STATUS_CLASSES = frozenset({"1xx", "2xx", "3xx", "4xx", "5xx"})
_OTHER = "other"
_MAX_ROUTES = 64

# Every name under which a sample family is exported, for the dashboard and its test. Histograms
# also have _bucket, _sum and _count.
METRIC_NAMES = (
    "spark_requests_started_total",
    "spark_requests_finished_total",
    "spark_requests_active",
    "spark_prompt_tokens_total",
    "spark_generation_tokens_total",
    "spark_request_prompt_tokens",
    "spark_request_generation_tokens",
    "spark_time_to_first_token_seconds",
    "spark_inter_token_seconds",
    "spark_request_seconds",
    "spark_queue_seconds",
    "spark_step_seconds",
    "spark_engine_state",
    "spark_engine_age_seconds",
    "spark_engine_restarts_total",
    "spark_engine_start_seconds",
    "spark_ledger_bytes",
    "spark_build_info",
    "spark_model_info",
    "spark_http_requests_total",
    "spark_metrics_faults_total",
    *ENGINE_NAMES,
    *PROCESS_NAMES,
    *PREFIX_CACHE_NAMES,
    *SPECULATION_NAMES,
    *WATCHDOG_NAMES,
)

logger = logging.getLogger(__name__)


def _safe(method: Callable[P, R]) -> Callable[P, R | None]:
    """Count a fault of ours instead of letting it reach the request that is being accounted."""

    @functools.wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return method(*args, **kwargs)
        except Exception:
            logger.exception("A metric could not be recorded")
            owner = args[0]
            assert isinstance(owner, Metrics)
            owner.faults.inc()
            return None

    return guarded


class Metrics:
    """All metrics of one server; implements `RequestObserver`.

    Token totals and per-request token histograms follow one rule, aborted requests included: a
    prompt counts when its request ends, an output token when it reaches the API, whether or not a
    watchdog takes it back later. The `spark_engine_*` counters say what the engine computed.
    """

    def __init__(self) -> None:
        # A creation time beside every counter doubles the page.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._engine = EngineCollector()
        self._processes = ProcessCollector()
        self._speculation = SpeculationCollector()
        self._prefix_cache = PrefixCacheCollector()
        self.registry.register(self._engine)
        self.registry.register(self._speculation)
        self.registry.register(self._prefix_cache)
        self._watchdogs = WatchdogCollector()
        self.registry.register(self._watchdogs)
        self.registry.register(self._processes)
        self._routes: set[str] = set()
        self._open: dict[int, Endpoint] = {}
        self._make_request_metrics()
        self._make_engine_metrics()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self.registry)

    def _make_request_metrics(self) -> None:
        self.faults = self._counter("spark_metrics_faults", "Records that failed; a bug if not 0")
        self._started = self._counter(
            "spark_requests_started", "Sequences asked for", "endpoint", "streaming"
        )
        self._finished = self._counter(
            "spark_requests_finished", "Sequences that ended", "endpoint", "outcome"
        )
        for endpoint in Endpoint:
            for streaming in ("true", "false"):
                self._started.labels(endpoint.value, streaming)
            for outcome in Outcome:
                self._finished.labels(endpoint.value, outcome.value)
        self._active = Gauge(
            "spark_requests_active", "Sequences that the API waits for", registry=self.registry
        )
        self._prompt_total = self._counter("spark_prompt_tokens", "Prompt tokens of ended requests")
        self._output_total = self._counter("spark_generation_tokens", "Tokens sent to the API")
        self._prompt_tokens = self._histogram(
            "spark_request_prompt_tokens", "Prompt tokens per sequence", _TOKENS
        )
        self._output_tokens = self._histogram(
            "spark_request_generation_tokens", "Output tokens per sequence", _TOKENS
        )
        self._ttft = self._histogram(
            "spark_time_to_first_token_seconds", "From the HTTP request to the first token", _TTFT
        )
        self._inter_token = self._histogram(
            "spark_inter_token_seconds", "Between two tokens of a sequence, per token", _INTER_TOKEN
        )
        self._seconds = self._histogram(
            "spark_request_seconds", "From the HTTP request to the sequence's end", _REQUEST
        )
        self._queue = self._histogram(
            "spark_queue_seconds", "From arrival in the engine to admission", _QUEUE
        )
        self._http = self._counter(
            "spark_http_requests", "HTTP responses begun", "route", "method", "status"
        )

    def _make_engine_metrics(self) -> None:
        self._step = self._histogram(
            "spark_step_seconds", "Length of a step with its drafts", _STEP
        )
        self._restarts = self._counter("spark_engine_restarts", "Times the engine was restarted")
        self._state = Gauge(
            "spark_engine_state", "1 for the state it is in", ["state"], registry=self.registry
        )
        self._age = Gauge(
            "spark_engine_age_seconds",
            "Seconds without progress while work runs",
            registry=self.registry,
        )
        self._start = Gauge(
            "spark_engine_start_seconds",
            "Seconds of each phase of the last start",
            ["phase"],
            registry=self.registry,
        )
        self._ledger = Gauge(
            "spark_ledger_bytes",
            "Reserved bytes by term of the ledger",
            ["term", "kind"],
            registry=self.registry,
        )
        build = Gauge("spark_build_info", "Always 1", ["version"], registry=self.registry)
        build.labels(version()).set(1)
        self._model = Gauge(
            "spark_model_info", "Always 1, by what is served", ["model"], registry=self.registry
        )
        self.on_state(EngineState.LOADING)

    @_safe
    def on_start(self, key: int, endpoint: Endpoint, streaming: bool) -> None:
        self._open[key] = endpoint
        self._started.labels(endpoint.value, "true" if streaming else "false").inc()
        self._active.inc()

    @_safe
    def on_first_token(self, key: int, seconds: float) -> None:
        self._output_total.inc()
        self._ttft.observe(seconds)

    @_safe
    def on_tokens(self, key: int, count: int, seconds: float) -> None:
        if count <= 0:
            return
        self._output_total.inc(count)
        each = max(0.0, seconds) / count
        for _ in range(count):
            self._inter_token.observe(each)

    @_safe
    def on_finish(
        self,
        key: int,
        outcome: Outcome,
        prompt_tokens: int,
        completion_tokens: int,
        seconds: float,
        stats: RequestStats | None,
    ) -> None:
        endpoint = self._open.pop(key, None)
        if endpoint is None:
            return  # ended before; a second end must not make the gauge negative
        self._active.dec()
        self._finished.labels(endpoint.value, outcome.value).inc()
        if outcome in (Outcome.REJECTED, Outcome.UNAVAILABLE):
            return  # the engine never had it, so it has no tokens and no latency
        self._prompt_total.inc(max(0, prompt_tokens))
        self._prompt_tokens.observe(prompt_tokens)
        self._output_tokens.observe(completion_tokens)
        self._seconds.observe(seconds)
        if stats is not None:
            self._queue.observe(stats.queue_seconds)

    @_safe
    def on_http(self, route: str | None, method: str, status: int) -> None:
        """A response began; `route` is the route's template, None when no route matched."""
        if route is None or (route not in self._routes and len(self._routes) >= _MAX_ROUTES):
            route = _OTHER
        self._routes.add(route)
        status_class = f"{status // 100}xx"
        self._http.labels(
            route,
            method if method in _METHODS else _OTHER,
            status_class if status_class in _STATUS_CLASSES else _OTHER,
        ).inc()

    @_safe
    def on_step(self, stats: EngineStats, stepped: bool) -> None:
        """The engine reported; `stepped` is False when it only says that it is idle."""
        self._engine.report(stats)
        self._speculation.report(stats.speculation)
        self._prefix_cache.report(stats.prefix_cache)
        self._watchdogs.report(stats.watchdogs)
        if stepped:
            self._step.observe(stats.last_step_seconds)

    @_safe
    def on_state(self, state: EngineState, age: float = 0.0) -> None:
        """The engine's state as the API sees it, and its age without progress."""
        for each in EngineState:
            self._state.labels(each.value).set(1 if each is state else 0)
        self._age.set(age)

    @_safe
    def on_phase(self, phase: str, seconds: float) -> None:
        """One phase of the engine's start is done."""
        self._start.labels(phase).set(seconds)

    @_safe
    def on_ready(
        self, info: ModelInfo, terms: list[tuple[str, str, int]], baseline: EngineStats | None
    ) -> None:
        """An engine process takes work. `terms`: name, `exact` or `estimate`, bytes."""
        self._engine.restart(baseline)
        self._speculation.restart(baseline.speculation if baseline else None)
        self._prefix_cache.restart(baseline.prefix_cache if baseline else None)
        self._watchdogs.restart(baseline.watchdogs if baseline else None)
        self._model.clear()
        self._model.labels(info.model_id).set(1)
        self._ledger.clear()
        for term, kind, size in terms:
            self._ledger.labels(term, kind).set(size)

    @_safe
    def on_engine_lost(self) -> None:
        """The engine process is gone; its gauges fall to nothing."""
        self._engine.restart()
        self._speculation.restart()
        self._prefix_cache.restart()
        self._watchdogs.restart()
        self._processes.engine_lost()

    @_safe
    def on_restart(self) -> None:
        """A new engine process is started in place of a lost one."""
        self._restarts.inc()

    @_safe
    def on_heartbeat(self, cpu_seconds: float, resident: int, peak: int) -> None:
        """CPU time, resident bytes and peak of memory of the engine process."""
        self._processes.beat(cpu_seconds, resident, peak)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The page of /metrics and its content type, in the format that `accept` asks for."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type
