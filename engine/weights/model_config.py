"""config.json of the three families as one frozen config. Reads no tensor and imports no torch."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from engine.errors import ModelFormatError
from engine.weights.headers import tensor_names

logger = logging.getLogger(__name__)


class Family(StrEnum):
    """Which tensor names and layouts a checkpoint uses."""

    QWEN3_NEXT = "qwen3_next"
    QWEN3_5 = "qwen3_5"
    QWEN3_5_MOE = "qwen3_5_moe"


class LayerKind(StrEnum):
    """The mixer of a decoder layer, as spelled in `layer_types`."""

    LINEAR = "linear_attention"
    FULL = "full_attention"


_MODEL_TYPES = {
    "qwen3_next": Family.QWEN3_NEXT,
    "qwen3_5": Family.QWEN3_5,
    "qwen3_5_text": Family.QWEN3_5,
    "qwen3_5_moe": Family.QWEN3_5_MOE,
    "qwen3_5_moe_text": Family.QWEN3_5_MOE,
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and constants of one model; names as in transformers' configs.

    Attributes beyond those names:
        layer_kinds: the mixer of every decoder layer.
        rotary_dim: leading dims of a head that rotate.
        num_experts: 0 for a dense model.
        mtp_layers: 1 when the checkpoint has a drafter, else 0.
        eos_token_ids: from generation_config.json and config.json, without repeats.
        dtype: of the checkpoint as config.json says it, for estimates only.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    layer_kinds: tuple[LayerKind, ...]
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rotary_dim: int
    tie_word_embeddings: bool
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    norm_topk_prob: bool
    mtp_layers: int
    eos_token_ids: tuple[int, ...]
    dtype: str

    @property
    def key_dim(self) -> int:
        """Channels of q, and of k, in a GDN layer."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        """Channels of v, and of z, in a GDN layer."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels that pass through a GDN layer's convolution."""
        return 2 * self.key_dim + self.value_dim

    @property
    def gdn_layers(self) -> int:
        """Layers with a recurrent state."""
        return self.layer_kinds.count(LayerKind.LINEAR)

    @property
    def attention_layers(self) -> int:
        """Layers of the trunk with a KV cache (the drafter has one more)."""
        return self.layer_kinds.count(LayerKind.FULL)


def load_config(folder: Path) -> ModelConfig:
    """Read config.json and generation_config.json of a model folder.

    Raises:
        ModelFormatError: a file is missing or is no JSON object, or the model cannot be served.
    """
    config = _read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    extra = _read_json(generation) if generation.is_file() else {}
    names = tensor_names(folder)
    has_mtp = any(name.startswith("mtp.") for name in names)
    parsed = parse_config(config, generation=extra, has_mtp=has_mtp)
    if parsed.mtp_layers and names and not has_mtp:
        # transformers drops mtp.* when it saves, and leaves the promise in config.json.
        logger.info("%s promises a drafter and has no mtp.* tensors, so there is none", folder)
        return replace(parsed, mtp_layers=0)
    return parsed


def parse_config(
    config: Mapping[str, Any],
    *,
    generation: Mapping[str, Any] | None = None,
    has_mtp: bool = False,
) -> ModelConfig:
    """A ModelConfig from the parsed JSON of config.json, nested or flat.

    Args:
        config: config.json.
        generation: generation_config.json, whose end ids come first.
        has_mtp: the checkpoint holds `mtp.` tensors; decides when the config is silent.

    Raises:
        ModelFormatError: names the key that is missing or that cannot be served.
    """
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise ModelFormatError("config.json: text_config is not an object")
    family = _family(config, text)
    reader = _Reader(text)
    head_dim = reader.integer("head_dim")
    rope = _Reader(_rope(text))
    experts = reader.integer("num_experts", 0, low=0) if family is not Family.QWEN3_5 else 0
    parsed = ModelConfig(
        family=family,
        vocab_size=reader.integer("vocab_size"),
        hidden_size=reader.integer("hidden_size"),
        intermediate_size=reader.integer(
            "intermediate_size", 0 if experts else None, low=0 if experts else 1
        ),
        num_attention_heads=reader.integer("num_attention_heads"),
        num_key_value_heads=reader.integer("num_key_value_heads"),
        head_dim=head_dim,
        linear_num_key_heads=reader.integer("linear_num_key_heads"),
        linear_num_value_heads=reader.integer("linear_num_value_heads"),
        linear_key_head_dim=reader.integer("linear_key_head_dim"),
        linear_value_head_dim=reader.integer("linear_value_head_dim"),
        linear_conv_kernel_dim=reader.integer("linear_conv_kernel_dim", 4),
        layer_kinds=_layer_kinds(reader, text.get("layer_types")),
        max_position_embeddings=reader.integer("max_position_embeddings", 32768),
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
        rope_theta=rope.number("rope_theta", 10000.0),
        rotary_dim=_rotary_dim(head_dim, rope.number("partial_rotary_factor", 0.25)),
        tie_word_embeddings=bool(
            text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
        ),
        num_experts=experts,
        num_experts_per_tok=reader.integer("num_experts_per_tok") if experts else 0,
        moe_intermediate_size=reader.integer("moe_intermediate_size") if experts else 0,
        shared_expert_intermediate_size=(
            reader.integer("shared_expert_intermediate_size") if experts else 0
        ),
        # Qwen3.5 always divides by the sum; Qwen3-Next only when told to.
        norm_topk_prob=family is not Family.QWEN3_NEXT or bool(text.get("norm_topk_prob", True)),
        mtp_layers=_mtp_layers(reader, has_mtp),
        eos_token_ids=_end_ids(generation or {}, text, config),
        dtype=_stored_dtype(text, config),
    )
    _check_switches(text, config)
    _check_heads(parsed)
    return parsed


def _family(config: Mapping[str, Any], text: Mapping[str, Any]) -> Family:
    for source in (text, config):
        family = _MODEL_TYPES.get(str(source.get("model_type")))
        if family is not None:
            return family
    named = config.get("model_type") or text.get("model_type")
    known = ", ".join(sorted(_MODEL_TYPES))
    raise ModelFormatError(f"config.json: model_type {named!r} is not served; served are {known}")


def _stored_dtype(*sources: Mapping[str, Any]) -> str:
    named = (source.get(key) for source in sources for key in ("dtype", "torch_dtype"))
    return next((str(name) for name in named if name), "bfloat16")


def _rope(text: Mapping[str, Any]) -> Mapping[str, Any]:
    """rope_parameters, or the older keys beside each other at the top level."""
    rope = text.get("rope_parameters")
    if isinstance(rope, Mapping):
        kind = rope.get("rope_type", rope.get("type", "default"))
        merged = {k: text[k] for k in ("rope_theta", "partial_rotary_factor") if k in text}
        merged.update(rope)
    else:
        scaling = text.get("rope_scaling") or {}
        if not isinstance(scaling, Mapping):
            raise ModelFormatError(f"config.json: rope_scaling is {scaling!r}, not an object")
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        merged = {k: text[k] for k in ("rope_theta", "partial_rotary_factor") if k in text}
    if kind not in ("default", "mrope"):
        raise ModelFormatError(f"config.json: rope_type {kind!r} is not served; only default is")
    return merged


def _rotary_dim(head_dim: int, factor: float) -> int:
    rotary = int(head_dim * factor)
    if factor > 1 or rotary < 2 or rotary % 2:
        raise ModelFormatError(
            f"config.json: partial_rotary_factor is {factor:g}, of head_dim {head_dim} that is "
            f"{rotary}; a positive even number of at most {head_dim} dims can rotate"
        )
    return rotary


def _layer_kinds(reader: _Reader, named: Any) -> tuple[LayerKind, ...]:
    layers = reader.integer("num_hidden_layers")
    if named is None:
        interval = reader.integer("full_attention_interval", 4)
        return tuple(
            LayerKind.FULL if (i + 1) % interval == 0 else LayerKind.LINEAR for i in range(layers)
        )
    if not isinstance(named, list):
        raise ModelFormatError(f"config.json: layer_types is {named!r}, not a list")
    if len(named) != layers:
        raise ModelFormatError(
            f"config.json: layer_types has {len(named)} entries, num_hidden_layers is {layers}"
        )
    try:
        return tuple(LayerKind(kind) for kind in named)
    except ValueError as error:
        raise ModelFormatError(f"config.json: layer_types: {error}") from error


def _mtp_layers(reader: _Reader, has_mtp: bool) -> int:
    for key in ("mtp_num_hidden_layers", "num_nextn_predict_layers"):
        layers = reader.integer(key, -1, low=0)
        if layers > 1:
            raise ModelFormatError(f"config.json: {key} is {layers}; 0 or 1 is served")
        if layers >= 0:
            return layers
    return int(has_mtp)


def _end_ids(*sources: Mapping[str, Any]) -> tuple[int, ...]:
    found: list[int] = []
    for source in sources:
        value = source.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if type(token) is int and token not in found:
                found.append(token)
    return tuple(found)


def _check_switches(text: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Refuse every switch that asks for another computation than the one that is built."""
    if text.get("attention_bias"):
        raise ModelFormatError("config.json: attention_bias is true; biases are not served")
    if text.get("hidden_act", "silu") != "silu":
        raise ModelFormatError(f"config.json: hidden_act {text['hidden_act']!r} is not served")
    if text.get("output_gate_type", "swish") not in ("swish", "silu"):
        gate = text["output_gate_type"]
        raise ModelFormatError(f"config.json: output_gate_type {gate!r} is not served; swish is")
    if not text.get("attn_output_gate", True):
        raise ModelFormatError(
            "config.json: attn_output_gate is false; attention without its gate is not served"
        )
    if text.get("mtp_use_dedicated_embeddings"):
        raise ModelFormatError(
            "config.json: mtp_use_dedicated_embeddings is true; a drafter shares the embeddings"
        )
    if text.get("mlp_only_layers") or text.get("decoder_sparse_step", 1) != 1:
        raise ModelFormatError("config.json: models that mix dense and MoE layers are not served")
    # Nested configs carry it outside of text_config.
    if text.get("quantization_config") or config.get("quantization_config"):
        raise ModelFormatError("config.json: quantised checkpoints are not served")


def _check_heads(config: ModelConfig) -> None:
    if config.num_experts_per_tok > config.num_experts:
        raise ModelFormatError(
            f"config.json: num_experts_per_tok is {config.num_experts_per_tok} and num_experts "
            f"is {config.num_experts}"
        )
    for many, few, what in (
        (config.num_attention_heads, config.num_key_value_heads, "attention heads"),
        (config.linear_num_value_heads, config.linear_num_key_heads, "linear value heads"),
    ):
        if many % few:
            raise ModelFormatError(
                f"config.json: {many} {what} cannot share {few} key heads evenly"
            )


class _Reader:
    """Numbers of a config section, with the key named when one is missing or is none."""

    def __init__(self, section: Mapping[str, Any]) -> None:
        self._section = section

    def integer(self, key: str, default: int | None = None, *, low: int = 1) -> int:
        """A whole number of at least `low`; the default itself may be lower."""
        value = self._section.get(key)
        if value is None:
            if default is None:
                raise ModelFormatError(f"config.json: {key} is missing")
            return default
        if type(value) is not int or value < low:
            raise ModelFormatError(
                f"config.json: {key} is {value!r}, not a whole number of at least {low}"
            )
        return value

    def number(self, key: str, default: float) -> float:
        """A finite number above 0."""
        value = self._section.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e300:
            raise ModelFormatError(f"config.json: {key} is {value!r}, not a number above 0")
        return float(value)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelFormatError(f"{path} does not exist; is this a model folder?") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ModelFormatError(f"{path} holds no JSON object")
    return parsed
