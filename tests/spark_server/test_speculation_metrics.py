"""Speculation's metrics: every count of the engine arrives, rises over restarts, labels closed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.request import EngineStats, SpeculationStats
from engine.speculation.gate import PlainReason
from spark_server.engine_api import ModelInfo
from spark_server.metrics import Metrics
from spark_server.speculation_metrics import width_bucket

INFO = ModelInfo("tiny", 256, 64, 4, (1,))
SOME = SpeculationStats(
    verifies=10,
    draft_tokens=28,
    accepted_tokens=13,
    accepted_per_position=(7, 4, 2),
    accepted_lengths=(3, 3, 2, 2),
    engaged=True,
    engagements=2,
    disengagements=1,
    covered=5,
    uncovered=1,
    rungs=((1, 3), (6, 2)),
    steps_speculative=8,
    steps_plain=4,
    seconds_speculative=0.5,
    seconds_plain=0.125,
    reasons=(("controller", 3), ("too_wide", 1)),
    dcut_tokens=6,
    probes=2,
    reprobes=1,
    state_bytes=1000,
)


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"spark_spec_decode_{name}", labels)


def report(metrics: Metrics, stats: SpeculationStats | None) -> None:
    metrics.on_step(EngineStats(speculation=stats), stepped=True)
    assert metrics.registry.get_sample_value("spark_metrics_faults_total", {}) == 0


def series(metrics: Metrics) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    return {
        (sample.name, tuple(sorted(sample.labels.items())))
        for family in metrics.registry.collect()
        for sample in family.samples
    }


def counters(metrics: Metrics) -> dict[str, float]:
    """Everything that must never fall."""
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if family.type in ("counter", "histogram") and "cpu" not in family.name
    }


def test_every_count_arrives() -> None:
    metrics = Metrics()
    metrics.on_ready(INFO, [], EngineStats(speculation=SpeculationStats()))
    report(metrics, SOME)
    assert value(metrics, "num_drafts_total") == 10
    assert value(metrics, "num_draft_tokens_total") == 28
    assert value(metrics, "num_accepted_tokens_total") == 13
    positions = [
        value(metrics, "num_accepted_tokens_per_pos_total", position=str(p)) for p in range(4)
    ]
    assert positions == [7, 4, 2, None]
    buckets = [value(metrics, "accepted_length_bucket", le=f"{n}.0") for n in range(8)]
    assert buckets == [3, 6, 8, 10, 10, 10, 10, 10]
    assert value(metrics, "accepted_length_bucket", le="+Inf") == 10
    assert value(metrics, "accepted_length_count") == 10
    assert value(metrics, "accepted_length_sum") == 13
    assert value(metrics, "engaged") == 1
    assert value(metrics, "engagement_changes_total", to="engaged") == 2
    assert value(metrics, "engagement_changes_total", to="disengaged") == 1
    assert value(metrics, "active_slots", covered="true") == 5
    assert value(metrics, "active_slots", covered="false") == 1
    assert value(metrics, "steps_total", kind="speculative") == 8
    assert value(metrics, "steps_total", kind="plain") == 4
    assert value(metrics, "step_seconds_total", kind="speculative") == 0.5
    assert value(metrics, "step_seconds_total", kind="plain") == 0.125
    assert value(metrics, "plain_steps_total", reason="controller") == 3
    assert value(metrics, "plain_steps_total", reason="too_wide") == 1
    assert value(metrics, "dcut_tokens_total") == 6
    assert value(metrics, "probes_total") == 2
    assert value(metrics, "reprobes_total") == 1
    assert value(metrics, "state_bytes_total") == 1000


@pytest.mark.parametrize("speculation", [None, SpeculationStats()])
def test_without_speculation_all_is_zero(speculation: SpeculationStats | None) -> None:
    metrics = Metrics()
    metrics.on_ready(INFO, [], EngineStats(speculation=speculation))
    report(metrics, speculation)
    found = [
        sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name.startswith("spark_spec_decode_")
    ]
    assert len(found) > 50
    assert set(found) == {0.0}


def test_what_the_warm_up_counted_does_not_count() -> None:
    metrics = Metrics()
    metrics.on_ready(INFO, [], EngineStats(speculation=SOME))
    assert value(metrics, "num_drafts_total") == 0
    report(metrics, replace(SOME, verifies=11, accepted_lengths=(3, 3, 2, 3)))
    assert value(metrics, "num_drafts_total") == 1
    assert value(metrics, "accepted_length_sum") == 3


def test_counters_rise_over_an_engine_restart_and_gauges_fall() -> None:
    metrics = Metrics()
    metrics.on_ready(INFO, [], EngineStats(speculation=SpeculationStats()))
    report(metrics, replace(SOME, verifies=4))
    report(metrics, SOME)
    before = counters(metrics)
    metrics.on_engine_lost()
    assert counters(metrics) == before
    assert value(metrics, "engaged") == 0
    assert value(metrics, "active_slots", covered="true") == 0
    assert value(metrics, "rung", width="5-8") is None
    metrics.on_restart()
    metrics.on_ready(INFO, [], EngineStats(speculation=SpeculationStats()))
    now = counters(metrics)
    assert {name: now[name] for name in now if "spec_" in name} == {
        name: before[name] for name in before if "spec_" in name
    }
    report(metrics, SpeculationStats(verifies=1, accepted_per_position=(1, 0, 0)))
    assert value(metrics, "num_drafts_total") == 11
    assert value(metrics, "num_accepted_tokens_per_pos_total", position="0") == 8
    assert value(metrics, "state_bytes_total") == 1000
    assert all(count >= before[name] for name, count in counters(metrics).items())


def test_the_rung_is_that_of_the_width_chosen_last() -> None:
    metrics = Metrics()
    report(metrics, SpeculationStats(covered=6, rungs=((5, 3), (6, 2))))
    assert value(metrics, "rung", width="5-8") == 2
    report(metrics, SpeculationStats(covered=5, rungs=((5, 3), (6, 2))))
    assert value(metrics, "rung", width="5-8") == 3
    report(metrics, SpeculationStats(rungs=((5, 3), (6, 2))))
    assert value(metrics, "rung", width="5-8") == 3, "nothing decodes, nothing was chosen"
    report(metrics, SpeculationStats(covered=4, uncovered=13, rungs=((17, 0),)))
    assert value(metrics, "rung", width="17-32") == 0
    assert value(metrics, "rung", width="1") is None


def test_drafts_count_at_the_width_that_they_were_chosen_for() -> None:
    metrics = Metrics()
    report(metrics, SpeculationStats(covered=2))
    report(metrics, SpeculationStats(covered=9, draft_tokens=6, accepted_tokens=4))
    report(metrics, SpeculationStats(draft_tokens=15, accepted_tokens=4))
    report(metrics, SpeculationStats(draft_tokens=15, accepted_tokens=4))
    for width, drafts, accepted in (("2", 6, 4), ("9-16", 9, 0), ("1", 0, 0)):
        assert value(metrics, "width_draft_tokens_total", width=width) == drafts
        assert value(metrics, "width_accepted_tokens_total", width=width) == accepted


@pytest.mark.parametrize(
    ("width", "label"),
    [(1, "1"), (2, "2"), (3, "3-4"), (8, "5-8"), (9, "9-16"), (32, "17-32"), (33, "33-64"),
     (128, "65-128"), (129, "129-"), (4096, "129-")],
)  # fmt: skip
def test_widths_have_few_labels(width: int, label: str) -> None:
    assert width_bucket(width) == label


def test_labels_come_from_closed_sets() -> None:
    metrics = Metrics()
    for width in range(1, 300):
        report(metrics, SpeculationStats(
            covered=width, rungs=((width, 1),), draft_tokens=width, reasons=(("controller", 1),)
        ))  # fmt: skip
    before = series(metrics)
    reasons = tuple((f"reason {number}", 1) for number in range(500))
    known = tuple((reason.value, 2) for reason in PlainReason)
    report(metrics, SpeculationStats(covered=5000, rungs=((5000, 1),), reasons=reasons + known))
    assert series(metrics) == before
    assert value(metrics, "plain_steps_total", reason="other") == 500
    assert {value(metrics, "plain_steps_total", reason=r.value) for r in PlainReason} == {2.0}
