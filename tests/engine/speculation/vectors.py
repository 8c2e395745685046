"""The public numbers of the policy's functions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_PATH = Path(__file__).parents[1] / "vectors" / "speculation.json"


def cases(name: str) -> list[dict[str, Any]]:
    """Arguments of one function, each with the result under `want`."""
    loaded: dict[str, list[dict[str, Any]]] = json.loads(_PATH.read_text())
    assert loaded[name]
    return loaded[name]
