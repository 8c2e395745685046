"""The watchdogs' metrics: every count arrives, rises over restarts, and labels are closed."""

from __future__ import annotations

import pytest

from engine.request import EngineStats, WatchdogStats
from spark_server.engine_api import ModelInfo
from spark_server.metrics import METRIC_NAMES, Metrics
from spark_server.watchdog_metrics import WATCHDOG_NAMES

INFO = ModelInfo("tiny", 256, 64, 4, (1,))
SOME = WatchdogStats(
    ring_slots=4,
    detections=(("loop", 5), ("repetition", 2)),
    rollbacks=3,
    retracted=210,
    stops=(("sent", 2), ("exhausted", 1), ("unreachable", 1)),
)
SERIES = {
    ("spark_watchdog_detections_total", ("kind", "loop")): 5,
    ("spark_watchdog_detections_total", ("kind", "repetition")): 2,
    ("spark_watchdog_rollbacks_total", None): 3,
    ("spark_watchdog_retracted_tokens_total", None): 210,
    ("spark_watchdog_stops_total", ("cause", "sent")): 2,
    ("spark_watchdog_stops_total", ("cause", "exhausted")): 1,
    ("spark_watchdog_stops_total", ("cause", "unreachable")): 1,
}


def value(metrics: Metrics, name: str, label: tuple[str, str] | None) -> float | None:
    return metrics.registry.get_sample_value(name, dict([label] if label else ()))


def test_all_is_there_and_nothing_when_nobody_watches() -> None:
    metrics = Metrics()
    metrics.on_step(EngineStats(), stepped=True)
    assert {value(metrics, name, label) for name, label in SERIES} == {0.0}
    assert value(metrics, "spark_decode_ring_slots", None) == 0
    assert {name for name, _ in SERIES} | {"spark_decode_ring_slots"} == set(WATCHDOG_NAMES)
    assert set(WATCHDOG_NAMES) <= set(METRIC_NAMES)


@pytest.mark.parametrize("key", SERIES)
def test_counts_arrive_and_rise_over_a_restart(key: tuple[str, tuple[str, str] | None]) -> None:
    metrics = Metrics()
    metrics.on_ready(INFO, [], EngineStats(watchdogs=WatchdogStats()))
    for _ in range(2):
        metrics.on_step(EngineStats(watchdogs=SOME), stepped=True)
        assert value(metrics, *key) == SERIES[key]
    assert value(metrics, "spark_decode_ring_slots", None) == 4
    metrics.on_engine_lost()
    assert value(metrics, "spark_decode_ring_slots", None) == 0
    metrics.on_ready(INFO, [], EngineStats(watchdogs=WatchdogStats()))
    assert value(metrics, *key) == SERIES[key]
    metrics.on_step(EngineStats(watchdogs=SOME), stepped=True)
    assert value(metrics, *key) == 2 * SERIES[key]
    assert metrics.registry.get_sample_value("spark_metrics_faults_total", {}) == 0
