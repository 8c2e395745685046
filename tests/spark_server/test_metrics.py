"""Metrics: outcomes add up, labels stay closed, counters only rise, a fault stays inside."""

from __future__ import annotations

import math

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain

from engine.request import EngineStats, RequestStats
from spark_server.engine_api import Endpoint, EngineState, ModelInfo, Outcome
from spark_server.metrics import METRIC_NAMES, Metrics

INFO = ModelInfo("tiny", 256, 64, 4, (1,))


def value(metrics: Metrics, name: str, **labels: str) -> float:
    found = metrics.registry.get_sample_value(name, labels)
    assert found is not None, (name, labels)
    return found


def series(metrics: Metrics) -> int:
    return sum(len(family.samples) for family in metrics.registry.collect())


def test_every_name_is_exported_and_every_export_is_named() -> None:
    metrics = Metrics()
    metrics.on_ready(INFO, [("weights", "exact", 10)], None)
    metrics.on_phase("weights", 0.5)
    metrics.on_http("/health", "GET", 200)
    names = set()
    for family in metrics.registry.collect():
        names.add(f"{family.name}_total" if family.type == "counter" else family.name)
    assert names == set(METRIC_NAMES)


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
def test_the_page_parses(accept: str) -> None:
    metrics = Metrics()
    metrics.on_ready(
        ModelInfo('a"b\\c\n{d}', 256, 64, 4, (1,)), [("weights", "exact", 10)], EngineStats()
    )
    page, content_type = metrics.render(accept)
    parse = openmetrics if "openmetrics" in content_type else plain
    families = {family.name: family for family in parse(page.decode())}
    assert families["spark_model_info"].samples[0].labels == {"model": 'a"b\\c\n{d}'}


def test_each_outcome_counts_once_and_tokens_agree() -> None:
    metrics = Metrics()
    for key, outcome in enumerate(Outcome):
        metrics.on_start(key, Endpoint.CHAT, streaming=True)
        metrics.on_first_token(key, 0.2)
        metrics.on_tokens(key, 3, 0.03)
        metrics.on_finish(key, outcome, 7, 4, 0.3, RequestStats(queue_seconds=0.01))
        metrics.on_finish(key, outcome, 7, 4, 0.3, None)
    finished = [
        value(metrics, "spark_requests_finished_total", endpoint=Endpoint.CHAT, outcome=o)
        for o in Outcome
    ]
    assert finished == [1.0] * len(Outcome)
    assert value(metrics, "spark_requests_active") == 0
    ran = len(Outcome) - 2
    assert value(metrics, "spark_prompt_tokens_total") == 7 * ran
    assert value(metrics, "spark_request_prompt_tokens_sum") == 7 * ran
    assert value(metrics, "spark_queue_seconds_count") == ran


def test_inter_token_is_per_token_not_per_step() -> None:
    metrics = Metrics()
    metrics.on_start(1, Endpoint.COMPLETIONS, streaming=False)
    metrics.on_tokens(1, 4, 0.4)
    assert value(metrics, "spark_inter_token_seconds_count") == 4
    assert math.isclose(value(metrics, "spark_inter_token_seconds_sum"), 0.4)
    assert value(metrics, "spark_inter_token_seconds_bucket", le="0.1") == 4
    assert value(metrics, "spark_inter_token_seconds_bucket", le="0.05") == 0


def test_labels_come_from_closed_sets() -> None:
    metrics = Metrics()
    for route in ("/v1/models", "/health", None):
        for method in ("GET", "BREW"):
            metrics.on_http(route, method, 200)
            metrics.on_http(route, method, 777)
    before = series(metrics)
    for number in range(2000):
        metrics.on_http(None, f"M{number}", number)
    after = series(metrics)
    assert after - before <= 2 * 4, "status classes 1xx to 5xx of the unknown route at most"
    assert value(
        metrics, "spark_http_requests_total", route="other", method="other", status="other"
    )


def test_many_routes_end_in_other() -> None:
    metrics = Metrics()
    for number in range(1000):
        metrics.on_http(f"/{number}", "GET", 200)
    assert len(
        [s for f in metrics.registry.collect() for s in f.samples if "route" in s.labels]
    ) < (2 * 70)


def test_engine_counters_rise_over_restarts_and_gauges_fall_to_idle() -> None:
    metrics = Metrics()
    warm = EngineStats(generation_tokens=8, prompt_tokens=4, steps_by_kind=(("decode", 8),))
    metrics.on_ready(INFO, [], warm)
    assert value(metrics, "spark_engine_generation_tokens_total") == 0
    busy = EngineStats(
        running=3,
        slots_used=3,
        kv_blocks_used=9,
        generation_tokens=108,
        prompt_tokens=24,
        last_step_seconds=0.002,
        steps_by_kind=(("decode", 60), ("mixed", 2)),
    )
    metrics.on_step(busy, stepped=True)
    metrics.on_heartbeat(5.0, 1000, 2000)
    assert value(metrics, "spark_engine_peak_bytes") == 2000
    assert value(metrics, "spark_engine_generation_tokens_total") == 100
    assert value(metrics, "spark_requests_running") == 3
    metrics.on_engine_lost()
    assert value(metrics, "spark_engine_peak_bytes") == 0
    assert value(metrics, "spark_requests_running") == 0
    assert value(metrics, "spark_kv_blocks_used") == 0
    assert value(metrics, "spark_engine_generation_tokens_total") == 100
    metrics.on_restart()
    metrics.on_ready(INFO, [], warm)
    metrics.on_step(EngineStats(generation_tokens=9), stepped=False)
    metrics.on_heartbeat(1.0, 1000, 1000)
    assert value(metrics, "spark_engine_generation_tokens_total") == 101
    assert value(metrics, "spark_steps_total", kind="decode") == 52
    assert value(metrics, "spark_process_cpu_seconds_total", process="engine") == 6.0
    assert value(metrics, "spark_engine_restarts_total") == 1
    assert value(metrics, "spark_step_seconds_count") == 1, "an idle report is no step"


def test_one_state_at_a_time() -> None:
    metrics = Metrics()
    metrics.on_state(EngineState.STUCK, 12.5)
    states = {s: value(metrics, "spark_engine_state", state=s) for s in EngineState}
    assert {s for s, v in states.items() if v} == {EngineState.STUCK}
    assert value(metrics, "spark_engine_age_seconds") == 12.5


def test_a_fault_is_counted_and_not_raised(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    metrics.on_start(1, None, streaming=True)  # type: ignore[arg-type]
    assert value(metrics, "spark_metrics_faults_total") == 1
    assert "could not be recorded" in caplog.text


def test_nothing_of_a_request_is_ever_a_label() -> None:
    metrics = Metrics()
    before = series(metrics)
    for key in range(500):
        metrics.on_start(key, Endpoint.CHAT, streaming=False)
        metrics.on_finish(key, Outcome.REJECTED, 0, 0, 0.0, None)
    assert series(metrics) == before
