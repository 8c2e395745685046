"""Every tensor that a checkpoint of a ModelConfig holds, and what they take. Reads no file.

Names and shapes as the published checkpoints have them; the vision tower is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from engine.config import EngineConfig
from engine.errors import ModelFormatError
from engine.weights.headers import TensorHeader
from engine.weights.model_config import Family, LayerKind, ModelConfig

_ELEMENT_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "F64": 8,
    "F32": 4,
    "BF16": 2,
    "F16": 2,
}
# As safetensors spells them, and as config.json does.
_SPELLED = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
# Larger drafters are bound by memory, not by calls: products on several threads serve them better.
CHAIN_BYTES = 16 * 2**20
_HALF = ("float16", "F16", "bfloat16", "BF16")
_IGNORED = ("model.visual.", "visual.")
# Qwen3.5 checkpoints are bfloat16 with these two kept in float32.
_FLOAT32_NAMES = (".A_log", ".linear_attn.norm.weight")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint; `dtype` as config.json or as safetensors spells it."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.elements * element_bytes(self.dtype)


def element_bytes(dtype: str) -> int:
    """Bytes of one number.

    Raises:
        ModelFormatError: a dtype that is not served.
    """
    try:
        return _ELEMENT_BYTES[dtype]
    except KeyError:
        raise ModelFormatError(
            f"dtype {dtype} is not served; served are {', '.join(_ELEMENT_BYTES)}"
        ) from None


def tensors_of_config(model: ModelConfig) -> tuple[StoredTensor, ...]:
    """The checkpoint that a config stands for, drafter included when it has one."""
    shapes = dict(_trunk(model))
    if model.mtp_layers:
        shapes.update(_drafter(model))
    split = model.family is not Family.QWEN3_NEXT
    return tuple(
        StoredTensor(
            name, shape, "float32" if split and name.endswith(_FLOAT32_NAMES) else model.dtype
        )
        for name, shape in shapes.items()
    )


def tensors_of_headers(headers: Mapping[str, TensorHeader]) -> tuple[StoredTensor, ...]:
    """The checkpoint that lies on disk, without a vision tower."""
    return tuple(
        StoredTensor(name, header.shape, header.dtype)
        for name, header in headers.items()
        if not name.startswith(_IGNORED)
    )


def stored_bytes(tensors: Iterable[StoredTensor]) -> int:
    """Bytes of all of them in the files."""
    return sum(tensor.nbytes for tensor in tensors)


def resident_bytes(
    tensors: Iterable[StoredTensor],
    model: ModelConfig,
    config: EngineConfig,
    *,
    with_mtp: bool,
) -> int:
    """Bytes of the loaded network: an upper bound for bfloat16 checkpoints on a CPU, else exact."""
    parts = resident_parts(tensors, model, config, with_mtp=with_mtp)
    return sum(part.nbytes for part in parts)


@dataclass(frozen=True, slots=True)
class ResidentPart:
    """Numbers of one kind and width in memory."""

    what: str
    elements: int
    width: int

    @property
    def nbytes(self) -> int:
        """Bytes of them."""
        return self.elements * self.width


def resident_parts(
    tensors: Iterable[StoredTensor],
    model: ModelConfig,
    config: EngineConfig,
    *,
    with_mtp: bool,
) -> tuple[ResidentPart, ...]:
    """What the loaded network is made of.

    Embeddings keep their dtype; a tied lm_head is packed beside them, or is them where the packed
    form is the tensor itself; norms, gates and convolutions are float32; matrices take what
    `packed_element_bytes` says. A small drafter on a CPU also keeps its matrices as its own
    kernel takes them.
    """
    loaded = [t for t in tensors if with_mtp or not t.name.startswith("mtp.")]
    counts: dict[tuple[str, int], int] = {}

    def add(what: str, elements: int, width: int) -> None:
        counts[what, width] = counts.get((what, width), 0) + elements

    for tensor in loaded:
        packed = packed_element_bytes(tensor.dtype, config)
        if tensor.name.endswith("embed_tokens.weight"):
            add("embeddings", tensor.elements, element_bytes(tensor.dtype))
            if model.tie_word_embeddings and not _packs_in_place(tensor.dtype, config):
                add("packed matrices", tensor.elements, packed)
        elif tensor.name == "lm_head.weight" and model.tie_word_embeddings:
            continue
        elif _is_vector(tensor):
            add("norms, gates and convolutions", tensor.elements, 4)
        else:
            add("packed matrices", tensor.elements, packed)
    for tensor in _chain_matrices(loaded, model, config):
        for what, count, width in _tile_parts(*tensor.shape):
            add(f"the drafter's {what} in tiles", count, width)
    return tuple(ResidentPart(what, n, width) for (what, width), n in counts.items())


def _is_vector(tensor: StoredTensor) -> bool:
    return len(tensor.shape) < 2 or tensor.name.endswith("conv1d.weight")


def _packs_in_place(dtype: str, config: EngineConfig) -> bool:
    """Whether a matrix that is stored as `dtype` is used as it is read, without a copy."""
    return not uses_cpu_kernels(config) and _SPELLED.get(dtype, dtype) == config.dtype


def _chain_matrices(
    tensors: list[StoredTensor], model: ModelConfig, config: EngineConfig
) -> list[StoredTensor]:
    """Those that a drafter in one kernel (kernels.draft_chain) keeps beside the packed ones.

    The lm_head is among them, though it be tied: a table of embeddings is not read in tiles.
    """
    inner = [t for t in tensors if t.name.startswith("mtp.") and not _is_vector(t)]
    heads = ("lm_head.weight", "embed_tokens.weight")
    outer = [t for t in tensors if t.name.endswith(heads)]
    fits = in_chain_tiles(model) and not model.num_experts
    if not inner or not fits or not uses_cpu_kernels(config):
        return []
    if any(_SPELLED.get(t.dtype, t.dtype) != "bfloat16" for t in (*inner, *outer)):
        return []
    tied = model.tie_word_embeddings
    head = next(t for t in outer if tied or t.name == "lm_head.weight")
    if stored_bytes(inner) + head.nbytes > CHAIN_BYTES:
        return []
    return [*inner, head]


def _tile_parts(rows: int, columns: int) -> tuple[tuple[str, int, int], ...]:
    """form.tile_parts; as they are stored where llvmlite, which knows the CPU, is missing."""
    if find_spec("llvmlite") is None:
        return (("matrices", rows * columns, 2),)
    from kernels.draft_chain.form import tile_parts

    return tile_parts(rows, columns)


def product_scratch_bytes(rows: int, columns: int, config: EngineConfig) -> int:
    """linear.form.scratch_bytes of the packed products, 0 where others run."""
    if not uses_cpu_kernels(config) or find_spec("llvmlite") is None:
        return 0
    from kernels.linear.form import scratch_bytes

    return scratch_bytes(rows, columns)


def in_chain_tiles(model: ModelConfig) -> bool:
    """Whether every matrix of a drafter is a whole number of kernels.draft_chain's tiles of 16."""
    sizes = (model.hidden_size, model.intermediate_size, model.vocab_size, model.head_dim)
    return all(size % 16 == 0 for size in sizes)


def packed_element_bytes(dtype: str, config: EngineConfig) -> int:
    """Bytes per number of a packed matrix that is stored as `dtype`.

    The CPU kernels keep bfloat16 where the CPU multiplies tiles of it. They pack in fp16 what fp16
    holds exactly after scaling by a power of two: all of a float16 checkpoint and, but for a matrix
    that spans more than 2^31, of a bfloat16 one.
    """
    if not uses_cpu_kernels(config):
        return element_bytes(config.dtype)
    return 2 if dtype in _HALF else 4


def uses_cpu_kernels(config: EngineConfig) -> bool:
    """Whether the packed linears and the numba kernels run, and not the plain torch forms."""
    chosen = config.kernels == "cpu" or (config.kernels == "auto" and config.dtype == "float32")
    return chosen and config.device == "cpu"


def _trunk(model: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    base = "model." if model.family is Family.QWEN3_NEXT else "model.language_model."
    vocabulary = (model.vocab_size, model.hidden_size)
    yield base + "embed_tokens.weight", vocabulary
    yield base + "norm.weight", (model.hidden_size,)
    if not model.tie_word_embeddings:
        yield "lm_head.weight", vocabulary
    for index, kind in enumerate(model.layer_kinds):
        yield from _layer(f"{base}layers.{index}.", kind, model)


def _drafter(model: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    width = model.hidden_size
    yield "mtp.fc.weight", (width, 2 * width)
    yield "mtp.pre_fc_norm_embedding.weight", (width,)
    yield "mtp.pre_fc_norm_hidden.weight", (width,)
    yield "mtp.norm.weight", (width,)
    yield from _layer("mtp.layers.0.", LayerKind.FULL, model)


def _layer(base: str, kind: LayerKind, model: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    width = model.hidden_size
    yield base + "input_layernorm.weight", (width,)
    yield base + "post_attention_layernorm.weight", (width,)
    if kind is LayerKind.LINEAR:
        yield from _gdn(base + "linear_attn.", model)
    else:
        yield from _attention(base + "self_attn.", model)
    yield from (
        _moe(base + "mlp.", model)
        if model.num_experts
        else _gated_mlp(base + "mlp.", model.intermediate_size, width)
    )


def _gdn(base: str, model: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, heads = model.hidden_size, model.linear_num_value_heads
    if model.family is Family.QWEN3_NEXT:
        yield base + "in_proj_qkvz.weight", (model.conv_dim + model.value_dim, width)
        yield base + "in_proj_ba.weight", (2 * heads, width)
    else:
        yield base + "in_proj_qkv.weight", (model.conv_dim, width)
        yield base + "in_proj_z.weight", (model.value_dim, width)
        yield base + "in_proj_b.weight", (heads, width)
        yield base + "in_proj_a.weight", (heads, width)
    yield base + "conv1d.weight", (model.conv_dim, 1, model.linear_conv_kernel_dim)
    yield base + "A_log", (heads,)
    yield base + "dt_bias", (heads,)
    yield base + "norm.weight", (model.linear_value_head_dim,)
    yield base + "out_proj.weight", (width, model.value_dim)


def _attention(base: str, model: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, dim = model.hidden_size, model.head_dim
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    yield base + "q_proj.weight", (2 * heads * dim, width)
    yield base + "k_proj.weight", (kv_heads * dim, width)
    yield base + "v_proj.weight", (kv_heads * dim, width)
    yield base + "o_proj.weight", (width, heads * dim)
    yield base + "q_norm.weight", (dim,)
    yield base + "k_norm.weight", (dim,)


def _gated_mlp(base: str, inner: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield base + "gate_proj.weight", (inner, width)
    yield base + "up_proj.weight", (inner, width)
    yield base + "down_proj.weight", (width, inner)


def _moe(base: str, model: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Experts in the fused form of published Qwen3.5; one by one they hold the same numbers."""
    width, experts, inner = model.hidden_size, model.num_experts, model.moe_intermediate_size
    yield base + "gate.weight", (experts, width)
    yield base + "experts.gate_up_proj", (experts, 2 * inner, width)
    yield base + "experts.down_proj", (experts, width, inner)
    yield from _gated_mlp(base + "shared_expert.", model.shared_expert_intermediate_size, width)
    yield base + "shared_expert_gate.weight", (1, width)
