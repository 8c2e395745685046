"""config.json of every family in every published spelling, and refusals that name the key."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelFormatError
from engine.weights.model_config import Family, LayerKind, load_config, parse_config
from tests.engine.tiny_weights import Tensors, text_config, write

FAMILIES = ["qwen3_next", "qwen3_5", "qwen3_5_moe"]


@pytest.mark.parametrize(
    ("model_type", "family"),
    [
        ("qwen3_next", Family.QWEN3_NEXT),
        ("qwen3_5", Family.QWEN3_5),
        ("qwen3_5_text", Family.QWEN3_5),
        ("qwen3_5_moe", Family.QWEN3_5_MOE),
        ("qwen3_5_moe_text", Family.QWEN3_5_MOE),
    ],
)
def test_flat(model_type: str, family: Family) -> None:
    config = parse_config(text_config(model_type))
    assert config.family is family
    assert (config.key_dim, config.value_dim, config.conv_dim) == (8, 12, 28)
    assert (config.gdn_layers, config.attention_layers) == (3, 1)
    assert config.num_experts == (0 if family is Family.QWEN3_5 else 3)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_nested_is_the_same_as_flat(family: str) -> None:
    nested = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": family,
        "text_config": text_config(family + "_text"),
        "vision_config": {"hidden_size": 1024, "depth": 24},
        "image_token_id": 5,
    }
    assert parse_config(nested) == parse_config(text_config(family))


def test_nested_without_its_own_model_type_takes_that_of_the_whole() -> None:
    text = text_config("x", model_type=None, intermediate_size=12)
    assert parse_config({"model_type": "qwen3_5", "text_config": text}).family is Family.QWEN3_5


def test_the_27b() -> None:
    text = {
        "attention_bias": False,
        "attn_output_gate": True,
        "eos_token_id": 248044,
        "pad_token_id": None,
        "dtype": "bfloat16",
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "num_attention_heads": 24,
        "num_hidden_layers": 64,
        "num_key_value_heads": 4,
        "output_gate_type": "swish",
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": False,
        "vocab_size": 248320,
    }
    generation = {"eos_token_id": [248046, 248044]}
    config = parse_config({"model_type": "qwen3_5", "text_config": text}, generation=generation)
    assert (config.gdn_layers, config.attention_layers, config.mtp_layers) == (48, 16, 1)
    assert (config.conv_dim, config.value_dim, config.rotary_dim) == (10240, 6144, 64)
    assert config.rope_theta == 1e7
    assert config.eos_token_ids == (248046, 248044)


def test_layer_types_are_derived_or_read() -> None:
    linear, full = LayerKind.LINEAR, LayerKind.FULL
    derived = parse_config(text_config("qwen3_5", num_hidden_layers=6, full_attention_interval=3))
    assert derived.layer_kinds == (linear, linear, full) * 2
    silent = parse_config(text_config("qwen3_5", full_attention_interval=None))
    assert silent.layer_kinds == (linear, linear, linear, full)
    named = ["full_attention", "linear_attention", "linear_attention", "linear_attention"]
    read = parse_config(text_config("qwen3_5", layer_types=named))
    assert read.layer_kinds == (full, linear, linear, linear)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.5}},
        {"rope_parameters": {"rope_theta": 5e5}, "partial_rotary_factor": 0.5},
        {"rope_parameters": None, "rope_theta": 5e5, "partial_rotary_factor": 0.5},
        {
            "rope_parameters": None,
            "rope_theta": 5e5,
            "partial_rotary_factor": 0.5,
            "rope_scaling": {"type": "default"},
        },
    ],
    ids=["parameters", "mixed", "legacy", "legacy-scaling"],
)
def test_rope_in_new_and_old_keys(rope: dict[str, Any]) -> None:
    config = parse_config(text_config("qwen3_5", **rope))
    assert (config.rope_theta, config.rotary_dim) == (5e5, 4)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_scaled_rope_is_refused(key: str) -> None:
    values = {"rope_parameters": None, key: {"rope_type": "yarn", "factor": 4.0}}
    with pytest.raises(ModelFormatError, match="rope_type 'yarn'"):
        parse_config(text_config("qwen3_5", **values))


@pytest.mark.parametrize(
    ("keys", "has_mtp", "layers"),
    [
        ({"mtp_num_hidden_layers": 1}, False, 1),
        ({"mtp_num_hidden_layers": 0}, True, 0),
        ({"num_nextn_predict_layers": 1}, False, 1),
        ({"mtp_num_hidden_layers": 0, "num_nextn_predict_layers": 1}, True, 0),
        ({}, True, 1),
        ({}, False, 0),
    ],
)
def test_depth_of_the_drafter(keys: dict[str, int], has_mtp: bool, layers: int) -> None:
    assert parse_config(text_config("qwen3_5", **keys), has_mtp=has_mtp).mtp_layers == layers


@pytest.mark.parametrize("drafter", [True, False])
def test_a_silent_config_asks_the_tensor_names(tmp_path: Path, drafter: bool) -> None:
    tensors = Tensors()
    tensors.trunk()
    if drafter:
        tensors.mtp()
    config = load_config(write(tmp_path / "m", text_config("qwen3_5"), tensors.made))
    assert config.mtp_layers == int(drafter)


@pytest.mark.parametrize(
    ("generation", "config", "want"),
    [
        (None, 7, (7,)),
        ([5, 7], 7, (5, 7)),
        (5, [7, 5, 9], (5, 7, 9)),
        (None, None, ()),
    ],
)
def test_end_ids_come_from_both_files(
    tmp_path: Path, generation: Any, config: Any, want: tuple[int, ...]
) -> None:
    values = text_config("qwen3_5", eos_token_id=config)
    (tmp_path / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert load_config(tmp_path).eos_token_ids == want


def test_the_weights_of_the_experts_are_normalised_unless_qwen3_next_says_no() -> None:
    assert parse_config(text_config("qwen3_next")).norm_topk_prob
    assert not parse_config(text_config("qwen3_next", norm_topk_prob=False)).norm_topk_prob
    assert parse_config(text_config("qwen3_5_moe", norm_topk_prob=False)).norm_topk_prob


def test_tied_embeddings_are_read_from_either_level() -> None:
    text = text_config("qwen3_5", tie_word_embeddings=None)
    nested = {"model_type": "qwen3_5", "tie_word_embeddings": True, "text_config": text}
    assert parse_config(nested).tie_word_embeddings
    nested["text_config"] = text | {"tie_word_embeddings": False}
    assert not parse_config(nested).tie_word_embeddings
    assert not parse_config(text).tie_word_embeddings


@pytest.mark.parametrize("level", ["text", "whole"])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_stored_type_is_read_from_either_level(level: str, key: str) -> None:
    nested: dict[str, Any] = {"model_type": "qwen3_5", "text_config": text_config("qwen3_5")}
    (nested if level == "whole" else nested["text_config"])[key] = "float16"
    assert parse_config(nested).dtype == "float16"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "llama"}, "'llama' is not served"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"head_dim": "8"}, "head_dim is '8'"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"vocab_size": 16.0}, r"vocab_size is 16\.0"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is 0"),
        ({"intermediate_size": None}, "intermediate_size is missing"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ({"layer_types": ["linear_attention"] * 3 + ["sliding"]}, "sliding"),
        ({"layer_types": 4}, "layer_types"),
        ({"layer_types": [["linear_attention"]] * 4}, "layer_types"),
        ({"full_attention_interval": "four"}, "full_attention_interval is 'four'"),
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers is 2"),
        ({"mtp_num_hidden_layers": "one"}, "mtp_num_hidden_layers is 'one'"),
        ({"num_nextn_predict_layers": 3}, "num_nextn_predict_layers is 3"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps is 'tiny'"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1"),
        ({"rope_parameters": {"rope_theta": "big"}}, "rope_theta is 'big'"),
        ({"rope_parameters": {"partial_rotary_factor": 2}}, "partial_rotary_factor is 2"),
        ({"rope_parameters": None, "rope_scaling": "x"}, "rope_scaling"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type 'sigmoid'"),
        ({"attn_output_gate": False}, "attn_output_gate is false"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"num_key_value_heads": 3}, "2 attention heads cannot share 3"),
        ({"linear_num_key_heads": 0}, "linear_num_key_heads is 0"),
    ],
)
def test_refusals_name_the_key(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelFormatError, match=words):
        parse_config(text_config("qwen3_5", **changes))


def test_a_quantised_checkpoint_is_refused_though_the_key_lies_outside() -> None:
    text = text_config("qwen3_5")
    outside = {"model_type": "qwen3_5", "quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(ModelFormatError, match="quantised"):
        parse_config(outside | {"text_config": text})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ({"num_experts_per_tok": 4}, "num_experts_per_tok is 4 and num_experts is 3"),
        ({"mlp_only_layers": [1]}, "mix dense and MoE"),
        ({"decoder_sparse_step": 2}, "mix dense and MoE"),
    ],
)
def test_refusals_of_a_moe(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelFormatError, match=words):
        parse_config(text_config("qwen3_next", **changes))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "does not exist; is this a model folder"),
        ("{", "cannot be read as JSON"),
        ("[]", "holds no JSON object"),
        ('{"text_config": 3}', "text_config is not an object"),
        ("[" * 100_000, "cannot be read as JSON"),
    ],
    ids=["absent", "cut", "list", "text_config", "deep"],
)
def test_files_that_are_no_config(tmp_path: Path, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelFormatError, match=words):
        load_config(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_junk_in_any_key_gives_another_error(family: str) -> None:
    whole = text_config(family, layer_types=["linear_attention"] * 3 + ["full_attention"])
    for key in whole:
        for junk in (None, "x", [], {}, [[]], -1, 0, 1.5, True, 10**30, float("nan")):
            with contextlib.suppress(ModelFormatError):
                parse_config(whole | {key: junk}, generation={"eos_token_id": junk})
