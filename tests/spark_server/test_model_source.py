"""Where a model is found; no test goes to the network."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from engine.errors import ConfigError
from spark_server.model_source import locate_model


def test_a_folder_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    assert locate_model(str(folder)).name == "my-model"
    monkeypatch.chdir(folder)
    assert locate_model(".").name == "my-model"


def test_a_folder_here_wins_over_the_packaged_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (Path(locate_model("spark-tiny").folder) / "config.json").is_file()
    (tmp_path / "spark-tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert locate_model("spark-tiny").folder == "spark-tiny"


@pytest.mark.parametrize("name", ["nothing", "/no/such/folder", "a/b/c", "../x y/z"])
def test_what_is_neither_folder_nor_id_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is no folder here"):
        locate_model(name)


def test_an_id_is_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        if name == "owner/offline":
            raise OSError("no network\nmore")
        return str(tmp_path)

    hub = types.ModuleType("huggingface_hub")
    hub.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    errors = types.ModuleType("huggingface_hub.errors")
    errors.HfHubHTTPError = errors.LocalEntryNotFoundError = OSError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", errors)
    found = locate_model("owner/model-1.5")
    assert (found.folder, found.name) == (str(tmp_path), "owner/model-1.5")
    assert asked[0][0] == "owner/model-1.5"
    assert "*.safetensors" in asked[0][1]
    with pytest.raises(ConfigError, match=r"could not be fetched from Hugging Face: no network$"):
        locate_model("owner/offline")
