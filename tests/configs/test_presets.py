"""Every preset is a settings file that the server accepts."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_server.settings import load_settings

PRESETS = sorted((Path(__file__).resolve().parents[2] / "configs" / "presets").glob("*.toml"))


def test_there_are_presets() -> None:
    assert PRESETS


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_the_server_accepts_it(path: Path) -> None:
    loaded = load_settings(["--config", str(path)], {})
    assert loaded.origins
    assert not loaded.warnings
    assert f"--config configs/presets/{path.name}" in path.read_text(encoding="utf-8")
