"""The geometries that come along for `spark plan`: they parse, and have their published sizes."""

from __future__ import annotations

import json
from importlib.resources import files

import pytest

from engine.reserve.parameters import tensors_of_config
from engine.reserve.ssm_reserve import ssm_blob
from engine.weights.model_config import parse_config

# Trunk parameters, and bytes of one sequence's recurrent state.
SIZES = {
    "qwen3.5-0.8b": (752_393_024, 20_643_840),
    "qwen3.6-27b": (26_895_998_464, 158_859_264),
    "qwen3.6-35b-a3b": (34_660_610_688, 66_846_720),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name: str) -> None:
    path = files("configs") / "geometries" / f"{name}.json"
    model = parse_config(json.loads(path.read_text(encoding="utf-8")))
    trunk = sum(t.elements for t in tensors_of_config(model) if not t.name.startswith("mtp."))
    assert (trunk, ssm_blob(model).nbytes) == SIZES[name]


def test_every_geometry_is_checked() -> None:
    folder = files("configs") / "geometries"
    assert {path.name.removesuffix(".json") for path in folder.iterdir()} == set(SIZES)
