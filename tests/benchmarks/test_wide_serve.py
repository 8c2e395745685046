"""Scraped pages as series: gauges, rates, shares, and the moments at which speculation turned."""

from __future__ import annotations

import math
from pathlib import Path

from benchmarks.wide_serve import Scrapes, changes, draw, share


def page(running: int, engaged: int, uncovered: int, drafts: int) -> str:
    return f"""# TYPE spark_requests_running gauge
spark_requests_running {running}
# TYPE spark_spec_decode_engaged gauge
spark_spec_decode_engaged {engaged}
# TYPE spark_spec_decode_active_slots gauge
spark_spec_decode_active_slots{{covered="true"}} {running - uncovered}
spark_spec_decode_active_slots{{covered="false"}} {uncovered}
# TYPE spark_spec_decode_num_drafts_total counter
spark_spec_decode_num_drafts_total {drafts}
"""


def scraped() -> Scrapes:
    scrapes = Scrapes()
    for i, values in enumerate([(0, 0, 0, 0), (4, 1, 0, 10), (70, 0, 38, 30), (3, 1, 0, 31)]):
        scrapes.add(i / 2, page(*values))
    return scrapes


def test_series() -> None:
    scrapes = scraped()
    assert scrapes.gauge("spark_requests_running") == [0, 4, 70, 3]
    assert scrapes.gauge("spark_spec_decode_active_slots", ("false",)) == [0, 0, 38, 0]
    assert scrapes.rate("spark_spec_decode_num_drafts_total", over=2) == [0, 10, 30, 21]
    assert scrapes.labels("spark_spec_decode_active_slots") == [("false",), ("true",)]
    shares = share([1.0, 0.0], [4.0, 0.0])
    assert shares[0] == 0.25
    assert math.isnan(shares[1])


def test_changes_say_who_ran() -> None:
    assert changes(scraped()) == [
        {"s": 0.5, "engaged": 1, "running": 4, "false": 0, "true": 4},
        {"s": 1.0, "engaged": 0, "running": 70, "false": 38, "true": 32},
        {"s": 1.5, "engaged": 1, "running": 3, "false": 0, "true": 3},
    ]


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    draw(scraped(), tmp_path / "panels.png")
    assert (tmp_path / "panels.png").read_bytes().startswith(b"\x89PNG")
