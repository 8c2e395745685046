"""What is measured of the prefix cache, read when somebody scrapes; labels come from closed sets.

Knows nothing of requests. Without prefix caching all of it is there and 0.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.prefix_cache.cache import Miss
from engine.request import PrefixCacheStats
from spark_server.rising import Rising

PREFIX_CACHE_NAMES = (
    "spark_prefix_cache_hits_total",
    "spark_prefix_cache_misses_total",
    "spark_prefix_cache_hit_tokens_total",
    "spark_prefix_cache_queried_tokens_total",
    "spark_prefix_cache_checkpoint_places",
    "spark_prefix_cache_checkpoints",
    "spark_prefix_cache_checkpoints_saved_total",
    "spark_prefix_cache_checkpoints_evicted_total",
    "spark_prefix_cache_blocks",
    "spark_prefix_cache_blocks_evicted_total",
)

_COUNTERS = (
    ("hits", "Sequences that began behind a cached prefix"),
    ("hit_tokens", "Prompt tokens that were reused and not computed"),
    ("queried_tokens", "Prompt tokens of all sequences that were looked up"),
    ("checkpoints_saved", "Recurrent states that were kept"),
    ("checkpoints_evicted", "Recurrent states that were given up for others"),
    ("blocks_evicted", "KV blocks that the cache gave up to sequences"),
)
_REASONS = tuple(reason.value for reason in Miss)


class PrefixCacheCollector(Collector):
    """Counters and gauges of `PrefixCacheStats` over all engine processes."""

    def __init__(self) -> None:
        self._totals: Rising[PrefixCacheStats, str] = Rising(_counts, PrefixCacheStats())

    def report(self, stats: PrefixCacheStats | None) -> None:
        """What the engine says of its cache; None when it has none."""
        if stats is not None:
            self._totals.report(stats)

    def restart(self, baseline: PrefixCacheStats | None = None) -> None:
        """A new process counts, or none; `baseline` is what its warm-up counted."""
        self._totals.restart(baseline)

    def collect(self) -> Iterator[Metric]:
        totals = self._totals.totals()
        for name, text in _COUNTERS:
            yield CounterMetricFamily(_full(name), text, value=totals.get(name, 0.0))
        misses = CounterMetricFamily(
            _full("misses"), "Sequences that reused nothing, by why", labels=["reason"]
        )
        for reason in _REASONS:
            misses.add_metric([reason], totals.get(reason, 0.0))
        yield misses
        now = self._totals.latest
        for name, text, value in (
            ("checkpoint_places", "Recurrent states that can be kept", now.checkpoint_places),
            ("checkpoints", "Recurrent states that are kept", now.checkpoints),
            ("blocks", "KV blocks that the cache holds, with sequences or alone", now.blocks),
        ):
            yield GaugeMetricFamily(_full(name), text, value=value)


def _full(name: str) -> str:
    return f"spark_prefix_cache_{name}"


def _counts(stats: PrefixCacheStats) -> dict[str, float]:
    """Everything in a report that only rises."""
    misses = dict(stats.misses)
    return {
        **{name: getattr(stats, name) for name, _ in _COUNTERS},
        **{reason: misses.get(reason, 0) for reason in _REASONS},
    }
