"""Checkpoints as others write them, and constants away from their defaults, against transformers.

The same numbers under other names, in other files, with other keys in config.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.runner import RowPhase
from tests.oracle.checkpoints import Oracle
from tests.oracle.ours import build, run, segment
from tests.oracle.test_logits import assert_close, prompt

Oracles = Callable[[str, int], Oracle]
Tensors = dict[str, Tensor]
Config = dict[str, Any]
IDS = prompt(77)
FILE = "model.safetensors"
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "patch_size": 4,
}


def rewrite(
    oracle: Oracle, folder: Path, change: Callable[[Tensors, Config], tuple[Tensors, Config]]
) -> Path:
    """The oracle's checkpoint in another folder, changed on the way."""
    config = json.loads((oracle.folder / "config.json").read_text())
    tensors, config = change(load_file(oracle.folder / FILE), config)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / FILE)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def reloaded(oracle: Oracle, folder: Path) -> Oracle:
    """The oracle that transformers reads from a rewritten folder."""
    model = type(oracle.model).from_pretrained(folder, attn_implementation="eager")
    return Oracle(folder, model.eval(), oracle.mtp)


def whole(folder: Path, ids: list[int] = IDS) -> Tensor:
    return build(folder, "cpu").forward([segment(0, 0, ids, RowPhase.PREFILL)]).logits


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_nested_checkpoints_with_a_vision_tower(
    oracles: Oracles, tmp_path: Path, family: str
) -> None:
    import transformers as tf

    oracle = oracles(family, 3)
    text = oracle.model.config.to_dict() | {"dtype": "float32"}
    config_class, model_class = {
        "qwen3_5": (tf.Qwen3_5Config, tf.Qwen3_5ForConditionalGeneration),
        "qwen3_5_moe": (tf.Qwen3_5MoeConfig, tf.Qwen3_5MoeForConditionalGeneration),
    }[family]
    model = model_class(config_class(text_config=text, vision_config=VISION)).eval()
    model.model.language_model.load_state_dict(oracle.model.model.state_dict())
    model.lm_head.load_state_dict(oracle.model.lm_head.state_dict())
    model.save_pretrained(tmp_path)
    names = load_file(tmp_path / FILE)
    assert "model.language_model.norm.weight" in names
    assert any(name.startswith("model.visual.") for name in names)
    assert_close(whole(tmp_path), oracle.logits(IDS))


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next"])
def test_fused_experts(oracles: Oracles, tmp_path: Path, family: str) -> None:
    oracle = oracles(family, 3)
    count = oracle.model.config.num_experts

    def fuse(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
        bases = {
            name.split(".experts.")[0] + ".experts." for name in tensors if ".experts." in name
        }
        assert len(bases) == 5  # four layers and the drafter's

        def take(base: str, name: str) -> Tensor:
            return torch.stack([tensors.pop(f"{base}{e}.{name}.weight") for e in range(count)])

        for base in bases:
            halves = [take(base, "gate_proj"), take(base, "up_proj")]
            tensors[base + "gate_up_proj"] = torch.cat(halves, dim=1)
            tensors[base + "down_proj"] = take(base, "down_proj")
        return tensors, config

    assert_close(whole(rewrite(oracle, tmp_path, fuse)), oracle.logits(IDS))


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_shards(oracles: Oracles, tmp_path: Path, family: str) -> None:
    oracle = oracles(family, 3)
    oracle.model.save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_close(whole(tmp_path), oracle.logits(IDS))


CONSTANTS: dict[str, tuple[str, Config]] = {
    "eps": ("qwen3_5", {"rms_norm_eps": 0.02}),
    "eps-next": ("qwen3_next", {"rms_norm_eps": 0.02}),
    "experts": ("qwen3_5_moe", {"num_experts_per_tok": 3}),
    "no-renormalisation": ("qwen3_next", {"norm_topk_prob": False}),
    "rope": (
        "qwen3_5",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 50.0,
                "partial_rotary_factor": 0.5,
                "mrope_interleaved": True,
                "mrope_section": [4, 2, 2],
            }
        },
    ),
    "legacy-rope": (
        "qwen3_next",
        {
            "rope_parameters": None,
            "rope_theta": 50.0,
            "partial_rotary_factor": 0.5,
            "rope_scaling": None,
        },
    ),
    "derived-layers": ("qwen3_next", {"layer_types": None, "full_attention_interval": 4}),
}
# What the key takes away again is no other model.
SAME_MODEL = {"derived-layers"}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_of_the_config(oracles: Oracles, tmp_path: Path, name: str) -> None:
    family, change = CONSTANTS[name]
    oracle = oracles(family, 3)

    def changed(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
        config |= change
        return tensors, {k: v for k, v in config.items() if v is not None}

    folder = rewrite(oracle, tmp_path, changed)
    want = reloaded(oracle, folder).logits(IDS)
    assert (float((want - oracle.logits(IDS)).abs().max()) > 0.01) == (name not in SAME_MODEL)
    assert_close(whole(folder), want)


@pytest.mark.parametrize("width", [2, 3])
def test_other_convolution_widths(
    oracles: Oracles, kernels: str, tmp_path: Path, width: int
) -> None:
    oracle = oracles("qwen3_5", 3)

    def narrow(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
        cut = {k: v[..., -width:] if k.endswith("conv1d.weight") else v for k, v in tensors.items()}
        return cut, config | {"linear_conv_kernel_dim": width}

    folder = rewrite(oracle, tmp_path, narrow)
    want = reloaded(oracle, folder).logits(IDS)
    model = build(folder, kernels)
    parts = [segment(1, 0, IDS[:40], RowPhase.PREFILL)]
    parts += [segment(1, i, [IDS[i]], RowPhase.DECODE) for i in range(40, len(IDS))]
    assert_close(run(model, parts), want)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 128, 193])
def test_large_gates(strong: Oracle, kernels: str, length: int) -> None:
    """Decays from almost none to e^-30 a token, writes near 0 and near 1; in chunks, one by one."""
    ids = prompt(length, 5)
    want, states = strong.logits(ids), strong.states(ids)
    model = build(strong.folder, kernels)
    parts = [segment(1, i, [token], RowPhase.REPLAY) for i, token in enumerate(ids)]
    assert_close(model.forward([segment(0, 0, ids, RowPhase.PREFILL)]).logits, want)
    assert_close(run(model, parts), want)
    for layer, (h, _) in enumerate(states):
        for slot in (0, 1):
            torch.testing.assert_close(model.states.h[layer, slot], h, atol=1e-5, rtol=1e-3)


@pytest.fixture(scope="module")
def strong(oracles: Oracles, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    oracle = oracles("qwen3_5", 3)

    def strengthen(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
        for name in tensors:
            if name.endswith("dt_bias"):
                heads = tensors[name].numel()
                tensors[name] = torch.linspace(-9, 9, heads)
            if name.endswith("in_proj_b.weight"):
                tensors[name] = 6 * tensors[name]
        return tensors, config

    return reloaded(oracle, rewrite(oracle, tmp_path_factory.mktemp("strong"), strengthen))
