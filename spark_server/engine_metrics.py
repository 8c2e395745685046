"""What the engine counts itself, read when somebody scrapes. Knows nothing of requests."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.request import EngineStats
from spark_server.rising import Rising

ENGINE_NAMES = (
    "spark_requests_running",
    "spark_requests_waiting",
    "spark_slots",
    "spark_slots_used",
    "spark_kv_blocks",
    "spark_kv_blocks_used",
    "spark_step_rows",
    "spark_steps_total",
    "spark_preemptions_total",
    "spark_jit_compiles_total",
    "spark_engine_prompt_tokens_total",
    "spark_engine_generation_tokens_total",
)

_STEP_KINDS = ("decode", "prefill", "mixed", "verify")


class EngineCollector(Collector):
    """Gauges and counters that the engine counts itself, read when somebody scrapes."""

    def __init__(self) -> None:
        self._totals: Rising[EngineStats, str] = Rising(_counts, EngineStats())

    def report(self, stats: EngineStats) -> None:
        """What the engine says of itself."""
        self._totals.report(stats)

    def restart(self, baseline: EngineStats | None = None) -> None:
        """A new engine process counts, or none; `baseline` is what its warm-up counted."""
        self._totals.restart(baseline)

    def collect(self) -> Iterator[Metric]:
        now = self._totals.latest
        gauges = (
            ("spark_requests_running", "Sequences in the running batch", now.running),
            ("spark_requests_waiting", "Sequences in the engine's queue", now.waiting),
            ("spark_slots", "State slots of the pool", now.slots_total),
            ("spark_slots_used", "State slots that a sequence owns", now.slots_used),
            ("spark_kv_blocks", "KV blocks of the pool", now.kv_blocks_total),
            ("spark_kv_blocks_used", "KV blocks that a sequence owns", now.kv_blocks_used),
            ("spark_step_rows", "Rows of the last step", now.last_step_rows if now.running else 0),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(name, text, value=value)
        counts = self._totals.totals()
        counters = (
            ("spark_engine_prompt_tokens", "Prompt tokens that the engine ran", "prompt"),
            ("spark_engine_generation_tokens", "Tokens that the engine emitted", "generation"),
            ("spark_preemptions", "Sequences that gave up their memory to others", "preemptions"),
            (
                "spark_jit_compiles",
                "Kernels compiled after the start; 0 if it made all",
                "compiles",
            ),
        )
        for name, text, key in counters:
            yield CounterMetricFamily(name, text, value=counts.get(key, 0.0))
        steps = CounterMetricFamily("spark_steps", "Steps by what they carried", labels=["kind"])
        for kind in _STEP_KINDS:
            steps.add_metric([kind], counts.get(kind, 0.0))
        yield steps


def _counts(stats: EngineStats) -> dict[str, float]:
    """Everything in a report that only rises."""
    kinds = dict(stats.steps_by_kind)
    return {
        "prompt": stats.prompt_tokens,
        "generation": stats.generation_tokens,
        "preemptions": stats.preemptions,
        "compiles": stats.jit_compiles,
        **{kind: kinds.get(kind, 0) for kind in _STEP_KINDS},
    }
