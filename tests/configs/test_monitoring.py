"""Prometheus and Grafana files: every name in them exists, and they fit together with compose."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from spark_server.metrics import METRIC_NAMES
from spark_server.speculation_metrics import SPECULATION_NAMES

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = files("configs")


DASHBOARDS = ("spark.json", "speculation.json")


def dashboard(name: str) -> dict[str, Any]:
    text = CONFIGS.joinpath("grafana", "dashboards", name).read_text(encoding="utf-8")
    return dict(json.loads(text))


def load(*parts: str) -> Any:
    return yaml.safe_load(CONFIGS.joinpath(*parts).read_text(encoding="utf-8"))


def expressions(name: str) -> list[str]:
    return [t["expr"] for panel in dashboard(name)["panels"] for t in panel.get("targets", [])]


def names(expression: str) -> set[str]:
    found = set(re.findall(r"\bspark_[a-z_]+", expression))
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in found}


def used(name: str) -> set[str]:
    return set().union(*(names(text) for text in expressions(name)))


def test_all_dashboards_are_known_and_told_apart() -> None:
    folder = CONFIGS.joinpath("grafana", "dashboards")
    assert sorted(entry.name for entry in folder.iterdir()) == list(DASHBOARDS)
    for key in ("uid", "title"):
        assert len({dashboard(name)[key] for name in DASHBOARDS}) == len(DASHBOARDS)


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_dashboard_names_only_metrics_that_exist(name: str) -> None:
    assert used(name) - set(METRIC_NAMES) == set()


def test_every_metric_is_on_a_dashboard() -> None:
    assert set(METRIC_NAMES) - set().union(*(used(name) for name in DASHBOARDS)) == set()
    assert set(SPECULATION_NAMES) - used("speculation.json") == set()


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_are_told_apart_and_do_not_overlap(name: str) -> None:
    panels = dashboard(name)["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(set(ids)) == len(ids)
    taken: dict[tuple[int, int], str] = {}
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        for cell in ((x, y) for x in range(at["x"], at["x"] + at["w"]) for y in
                     range(at["y"], at["y"] + at["h"])):  # fmt: skip
            assert cell not in taken, f"{panel['title']} lies over {taken[cell]}"
            taken[cell] = panel["title"]
    rows = [panel["gridPos"]["y"] for panel in panels if panel["type"] == "row"]
    assert all(upper < lower for upper, lower in pairwise(rows))


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_panel_asks_the_provisioned_data_source(name: str) -> None:
    (source,) = load("grafana", "provisioning", "datasources", "prometheus.yml")["datasources"]
    panels = [panel for panel in dashboard(name)["panels"] if panel["type"] != "row"]
    assert {panel["datasource"]["uid"] for panel in panels} == {source["uid"]}
    assert {t["datasource"]["uid"] for panel in panels for t in panel["targets"]} == {source["uid"]}
    assert (
        source["jsonData"]["timeInterval"]
        == (load("prometheus", "prometheus.yml")["global"]["scrape_interval"])
    )


def test_compose_runs_what_the_configuration_names() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    services = compose["services"]
    for service in services.values():
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            assert source in compose["volumes"] or (ROOT / source).is_dir(), mount
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    (group,) = load("prometheus", "targets", "spark.yml")
    (target,) = group["targets"]
    service, port = target.split(":")
    assert f"127.0.0.1:{port}:{port}" in services[service]["ports"]
    (source,) = load("grafana", "provisioning", "datasources", "prometheus.yml")["datasources"]
    service, port = source["url"].removeprefix("http://").split(":")
    assert f"127.0.0.1:{port}:{port}" in services[service]["ports"]
    (provider,) = load("grafana", "provisioning", "dashboards", "spark.yml")["providers"]
    folder = provider["options"]["path"]
    assert f"./configs/grafana/dashboards:{folder}:ro" in services["grafana"]["volumes"]
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{folder}/spark.json"


def test_prometheus_looks_for_targets_beside_its_file() -> None:
    (job,) = load("prometheus", "prometheus.yml")["scrape_configs"]
    assert job["file_sd_configs"][0]["files"] == ["targets/*.yml"]
    assert job["metrics_path"] == "/metrics"
