"""What is measured of the watchdogs, read when somebody scrapes; labels come from closed sets.

Without --watchdogs on all of it is there and 0. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.request import WatchdogStats
from engine.watchdogs.detectors import DetectionKind
from engine.watchdogs.watch import StopCause
from spark_server.rising import Rising

WATCHDOG_NAMES = (
    "spark_watchdog_detections_total",
    "spark_watchdog_rollbacks_total",
    "spark_watchdog_retracted_tokens_total",
    "spark_watchdog_stops_total",
    "spark_decode_ring_slots",
)

_KINDS = tuple(kind.value for kind in DetectionKind)
_CAUSES = tuple(cause.value for cause in StopCause)


class WatchdogCollector(Collector):
    """Counters and gauges of `WatchdogStats` over all engine processes."""

    def __init__(self) -> None:
        self._totals: Rising[WatchdogStats, tuple[str, str]] = Rising(_counts, WatchdogStats())

    def report(self, stats: WatchdogStats | None) -> None:
        """A step is done."""
        self._totals.report(stats or WatchdogStats())

    def restart(self, baseline: WatchdogStats | None = None) -> None:
        """A new process counts, or none; `baseline` is what its warm-up counted."""
        self._totals.restart(baseline)

    def collect(self) -> Iterator[Metric]:
        totals = self._totals.totals()
        labelled = (
            ("detections", "kind", _KINDS, "Times that output was seen to repeat itself"),
            ("stops", "cause", _CAUSES, "Outputs that were ended for it, by why not steered back"),
        )
        for name, label, values, text in labelled:
            family = CounterMetricFamily(f"spark_watchdog_{name}", text, labels=[label])
            for value in values:
                family.add_metric([value], totals.get((name, value), 0.0))
            yield family
        plain = (
            ("rollbacks", "Outputs that were steered back"),
            ("retracted_tokens", "Tokens that rollbacks took back"),
        )
        for name, text in plain:
            yield CounterMetricFamily(
                f"spark_watchdog_{name}", text, value=totals.get((name, ""), 0.0)
            )
        text = "Snapshots per sequence that a rollback can go back to"
        yield GaugeMetricFamily(
            "spark_decode_ring_slots", text, value=self._totals.latest.ring_slots
        )


def _counts(stats: WatchdogStats) -> dict[tuple[str, str], float]:
    """Everything in a report that only rises."""
    return {
        ("rollbacks", ""): stats.rollbacks,
        ("retracted_tokens", ""): stats.retracted,
        **{("detections", kind): count for kind, count in stats.detections},
        **{("stops", cause): count for cause, count in stats.stops},
    }
