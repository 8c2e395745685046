"""What is measured of speculation, read when somebody scrapes; labels come from closed sets.

Knows nothing of requests. Without --speculative all of it is there and 0, but for series by draft
position and by width's rung, which begin with the first report.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from engine.request import SpeculationStats
from engine.speculation.gate import PlainReason
from spark_server.rising import Rising
from spark_server.settings.speculation import MAX_NUM_DRAFTS

SPECULATION_NAMES = (
    "spark_spec_decode_num_drafts_total",
    "spark_spec_decode_num_draft_tokens_total",
    "spark_spec_decode_num_accepted_tokens_total",
    "spark_spec_decode_num_accepted_tokens_per_pos_total",
    "spark_spec_decode_accepted_length",
    "spark_spec_decode_width_draft_tokens_total",
    "spark_spec_decode_width_accepted_tokens_total",
    "spark_spec_decode_rung",
    "spark_spec_decode_engaged",
    "spark_spec_decode_engagement_changes_total",
    "spark_spec_decode_active_slots",
    "spark_spec_decode_steps_total",
    "spark_spec_decode_step_seconds_total",
    "spark_spec_decode_plain_steps_total",
    "spark_spec_decode_dcut_tokens_total",
    "spark_spec_decode_probes_total",
    "spark_spec_decode_reprobes_total",
    "spark_spec_decode_state_bytes_total",
)

_OTHER = "other"
# The engine says `dropped` when drafts were chosen and none was left at the step.
_REASONS = (*(reason.value for reason in PlainReason), "dropped", _OTHER)
# Widest batch of each bucket; the last bucket is open.
_WIDTHS = (
    (1, "1"),
    (2, "2"),
    (4, "3-4"),
    (8, "5-8"),
    (16, "9-16"),
    (32, "17-32"),
    (64, "33-64"),
    (128, "65-128"),
)
_WIDEST = "129-"

# A family and the value of its label, "" without one.
_Series = tuple[str, str]

_COUNTERS = (
    ("num_drafts", "Sequences verified with at least one draft"),
    ("num_draft_tokens", "Drafts that were verified"),
    ("num_accepted_tokens", "Drafts that were accepted"),
    ("dcut_tokens", "Drafts dropped before the verify as the least likely of their step"),
    ("probes", "First looks at a number of drafts"),
    ("reprobes", "Later looks at a number of drafts that is not in use"),
    ("state_bytes", "Recurrent state read and written"),
)
_LABELLED = (
    ("engagement_changes", "to", "Changes between speculating and not, by batch width"),
    ("steps", "kind", "Decode steps with and without drafts"),
    ("step_seconds", "kind", "Seconds of decode steps with and without drafts"),
    ("plain_steps", "reason", "Decode steps without drafts by why"),
    ("width_draft_tokens", "width", "Drafts that were verified, by sequences that decoded"),
    ("width_accepted_tokens", "width", "Drafts that were accepted, by sequences that decoded"),
)
_LABEL_VALUES = {
    "to": ("engaged", "disengaged"),
    "kind": ("speculative", "plain"),
    "reason": _REASONS,
    "width": (*(label for _, label in _WIDTHS), _WIDEST),
}


def width_bucket(width: int) -> str:
    """The label for a number of sequences that decode together."""
    return next((label for widest, label in _WIDTHS if width <= widest), _WIDEST)


class SpeculationCollector(Collector):
    """Counters and gauges of `SpeculationStats` over all engine processes."""

    def __init__(self) -> None:
        self._totals: Rising[SpeculationStats, _Series] = Rising(_counts, SpeculationStats())
        self._by_width: dict[_Series, float] = {}
        self._rungs: dict[str, int] = {}

    def report(self, stats: SpeculationStats | None) -> None:
        """A step is done; reports come once per step."""
        stats = stats or SpeculationStats()
        self._count_by_width(stats)
        self._totals.report(stats)
        width = stats.covered + stats.uncovered
        if width:
            self._rungs[width_bucket(width)] = dict(stats.rungs).get(width, 0)

    def restart(self, baseline: SpeculationStats | None = None) -> None:
        """A new process counts, or none; `baseline` is what its warm-up counted."""
        self._totals.restart(baseline)
        self._rungs.clear()

    def _count_by_width(self, stats: SpeculationStats) -> None:
        """The step's width is the one that the report before it made its choice for."""
        before = self._totals.latest
        drafts = stats.draft_tokens - before.draft_tokens
        if drafts <= 0:
            return
        label = width_bucket(before.covered + before.uncovered)
        for name, count in (
            ("width_draft_tokens", drafts),
            ("width_accepted_tokens", stats.accepted_tokens - before.accepted_tokens),
        ):
            key = (name, label)
            self._by_width[key] = self._by_width.get(key, 0.0) + count

    def collect(self) -> Iterator[Metric]:
        totals = self._totals.totals() | self._by_width
        for name, text in _COUNTERS:
            yield CounterMetricFamily(_full(name), text, value=totals.get((name, ""), 0.0))
        for name, label, text in _LABELLED:
            family = CounterMetricFamily(_full(name), text, labels=[label])
            for value in _LABEL_VALUES[label]:
                family.add_metric([value], totals.get((name, value), 0.0))
            yield family
        yield self._positions(totals)
        yield _lengths(totals)
        yield from self._gauges()

    def _positions(self, totals: dict[_Series, float]) -> Metric:
        name = "num_accepted_tokens_per_pos"
        text = "Verifies whose draft at this position was accepted; the first is 0"
        family = CounterMetricFamily(_full(name), text, labels=["position"])
        for position in range(MAX_NUM_DRAFTS):
            if (name, str(position)) in totals:
                family.add_metric([str(position)], totals[name, str(position)])
        return family

    def _gauges(self) -> Iterator[Metric]:
        now = self._totals.latest
        text = "1 while batches as wide as the last one may speculate"
        yield GaugeMetricFamily(_full("engaged"), text, value=int(now.engaged))
        slots = GaugeMetricFamily(
            _full("active_slots"),
            "Sequences that decode, by whether their slot may be verified",
            labels=["covered"],
        )
        slots.add_metric(["true"], now.covered)
        slots.add_metric(["false"], now.uncovered)
        yield slots
        rungs = GaugeMetricFamily(
            _full("rung"),
            "Drafts per sequence, as last chosen for a batch of this width",
            labels=["width"],
        )
        for label in _LABEL_VALUES["width"]:
            if label in self._rungs:
                rungs.add_metric([label], self._rungs[label])
        yield rungs


def _full(name: str) -> str:
    return f"spark_spec_decode_{name}"


def _lengths(totals: dict[_Series, float]) -> Metric:
    counts = [totals.get(("accepted_length", str(n)), 0.0) for n in range(MAX_NUM_DRAFTS + 1)]
    rising = list(accumulate(counts))
    buckets = [(f"{length}.0", count) for length, count in enumerate(rising)]
    return HistogramMetricFamily(
        _full("accepted_length"),
        "Accepted drafts per verify",
        buckets=[*buckets, ("+Inf", rising[-1])],
        sum_value=sum(length * count for length, count in enumerate(counts)),
    )


def _counts(stats: SpeculationStats) -> dict[_Series, float]:
    """Everything in a report that only rises."""
    counts: dict[_Series, float] = {
        ("num_drafts", ""): stats.verifies,
        ("num_draft_tokens", ""): stats.draft_tokens,
        ("num_accepted_tokens", ""): stats.accepted_tokens,
        ("dcut_tokens", ""): stats.dcut_tokens,
        ("probes", ""): stats.probes,
        ("reprobes", ""): stats.reprobes,
        ("state_bytes", ""): stats.state_bytes,
        ("engagement_changes", "engaged"): stats.engagements,
        ("engagement_changes", "disengaged"): stats.disengagements,
        ("steps", "speculative"): stats.steps_speculative,
        ("steps", "plain"): stats.steps_plain,
        ("step_seconds", "speculative"): stats.seconds_speculative,
        ("step_seconds", "plain"): stats.seconds_plain,
    }
    for position, count in enumerate(stats.accepted_per_position):
        counts["num_accepted_tokens_per_pos", str(position)] = count
    for length, count in enumerate(stats.accepted_lengths):
        counts["accepted_length", str(length)] = count
    for reason, count in stats.reasons:
        key = ("plain_steps", reason if reason in _REASONS else _OTHER)
        counts[key] = counts.get(key, 0.0) + count
    return counts
