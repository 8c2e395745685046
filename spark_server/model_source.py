"""Where the model's files are: the packaged one, a folder, or a Hugging Face id that is fetched.

Knows nothing of what is in the files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from engine.errors import ConfigError

PACKAGED = "spark-tiny"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_WANTED = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.txt"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A local folder and the name under which it is served unless another one is asked for."""

    folder: str
    name: str


def locate_model(model: str, *, download: bool = True) -> ModelSource:
    """Find the model's folder; a Hugging Face id is fetched, with its own progress bar.

    Raises:
        ConfigError: no such folder, or the id cannot be fetched.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return ModelSource(str(path), path.resolve().name)
    if model == PACKAGED:
        return ModelSource(str(files("spark_server") / "assets" / PACKAGED), PACKAGED)
    if path.exists():
        raise ConfigError(f"model {model} is a file; give the folder that holds config.json")
    if not download or not _HUB_ID.fullmatch(model):
        raise ConfigError(
            f"model {model} is no folder here; give a folder with config.json, "
            f"a Hugging Face id (owner/name) or {PACKAGED}"
        )
    return ModelSource(_fetch(model), model)


def _fetch(hub_id: str) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return str(snapshot_download(hub_id, allow_patterns=_WANTED))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"model {hub_id} is no folder here and could not be fetched from Hugging Face: {reason}"
        ) from None
