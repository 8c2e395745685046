"""config.json of the models that are checked: published ones, and miniatures for a smoke run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

SMALL = "qwen3.5-0.8b"
LARGE = "qwen3.6-27b"

# The smallest models that have every kind of layer; head ratios 1 and 3 as the two above.
_TINY: Mapping[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "full_attention_interval": 4,
    "max_position_embeddings": 512,
    "mtp_num_hidden_layers": 1,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
MINIATURES: Mapping[str, Mapping[str, Any]] = {
    "miniature-1": _TINY,
    "miniature-3": {**_TINY, "linear_num_value_heads": 6, "tie_word_embeddings": False},
}


def geometry(name: str) -> dict[str, Any]:
    """config.json as parsed JSON: a miniature, or one of `configs/geometries`."""
    if name in MINIATURES:
        return dict(MINIATURES[name])
    path = files("configs") / "geometries" / f"{name}.json"
    parsed: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return parsed
