"""Prometheus and Grafana files: every name in them exists, and they fit together with compose."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from spark_server.metrics import METRIC_NAMES

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = files("configs")


def dashboard() -> dict[str, Any]:
    text = CONFIGS.joinpath("grafana", "dashboards", "spark.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def load(*parts: str) -> Any:
    return yaml.safe_load(CONFIGS.joinpath(*parts).read_text(encoding="utf-8"))


def expressions() -> list[str]:
    return [t["expr"] for panel in dashboard()["panels"] for t in panel.get("targets", [])]


def names(expression: str) -> set[str]:
    found = set(re.findall(r"\bspark_[a-z_]+", expression))
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in found}


def test_the_dashboard_names_only_metrics_that_exist() -> None:
    used = set().union(*(names(text) for text in expressions()))
    assert used - set(METRIC_NAMES) == set()


def test_every_metric_is_on_the_dashboard() -> None:
    used = set().union(*(names(text) for text in expressions()))
    assert set(METRIC_NAMES) - used == set()


def test_panels_are_told_apart_and_do_not_overlap() -> None:
    panels = dashboard()["panels"]
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


def test_every_panel_asks_the_provisioned_data_source() -> None:
    (source,) = load("grafana", "provisioning", "datasources", "prometheus.yml")["datasources"]
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
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
