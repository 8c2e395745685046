"""Writing and reading the model folder: bfloat16 safetensors with the names Qwen3.5 publishes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor
from transformers import Qwen3_5ForCausalLM

from benchmarks.tiny.model import (
    END_OF_TEXT,
    END_OF_TURN,
    MtpHead,
    make_config,
    make_mtp,
    make_trunk,
)

MAX_BYTES = 8_388_608
#: Fields of every transformers configuration that say nothing about this model.
_NOISE = (
    "_name_or_path",
    "chunk_size_feed_forward",
    "id2label",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "return_dict",
)
_FLOAT32 = ("linear_attn.A_log", "linear_attn.norm.weight")


def tensors(trunk: Qwen3_5ForCausalLM, mtp: MtpHead) -> dict[str, Tensor]:
    """The checkpoint's tensors in their stored types; the tied head is left out."""
    out = {name: value for name, value in trunk.state_dict().items() if name != "lm_head.weight"}
    out |= {f"mtp.{name}": value for name, value in mtp.state_dict().items()}
    kinds = {name: torch.float32 if name.endswith(_FLOAT32) else torch.bfloat16 for name in out}
    return {name: value.detach().to(kinds[name]).contiguous() for name, value in out.items()}


def write(folder: Path, trunk: Qwen3_5ForCausalLM, mtp: MtpHead) -> int:
    """Write weights and configuration to `folder` and return the size of the weights in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    blob = save(tensors(trunk, mtp), metadata={"format": "pt"})
    if len(blob) > MAX_BYTES:
        raise ValueError(
            f"the weights take {len(blob)} bytes, more than the {MAX_BYTES} that are allowed"
        )
    replace(folder / "model.safetensors", blob)
    config = make_config().to_dict() | {"dtype": "bfloat16"}
    replace(folder / "config.json", _json({k: v for k, v in config.items() if k not in _NOISE}))
    generation = {
        "bos_token_id": END_OF_TEXT,
        "do_sample": False,
        "eos_token_id": [END_OF_TURN, END_OF_TEXT],
        "pad_token_id": END_OF_TEXT,
    }
    replace(folder / "generation_config.json", _json(generation))
    return len(blob)


def read(folder: Path) -> tuple[Qwen3_5ForCausalLM, MtpHead]:
    """The trainer's own modules in float32, filled from a model folder."""
    stored = {
        name: value.float() for name, value in load_file(folder / "model.safetensors").items()
    }
    trunk, mtp = make_trunk(0), make_mtp(0)
    mtp.load_state_dict(
        {name[4:]: value for name, value in stored.items() if name.startswith("mtp.")}
    )
    rest = {name: value for name, value in stored.items() if not name.startswith("mtp.")}
    trunk.load_state_dict(rest | {"lm_head.weight": stored["model.embed_tokens.weight"]})
    return trunk.eval(), mtp.eval()


def replace(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old or the new content, never half of it."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    os.replace(partial, path)


def _json(value: dict[str, object]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()
