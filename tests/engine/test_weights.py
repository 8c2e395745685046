"""The loader's rules on hand-made checkpoints: every naming, one layout, nothing left over."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.errors import ModelFormatError
from engine.weights.layout import (
    AttentionWeights,
    DenseMlpWeights,
    GdnWeights,
    LayerWeights,
    MoeWeights,
    MtpWeights,
)
from engine.weights.loader import Checkpoint
from engine.weights.model_config import load_config
from tests.engine.tiny_weights import (
    CONV,
    HEAD_DIM,
    HEADS,
    KEY_DIM,
    KEY_HEADS,
    LAYERS,
    VALUE_DIM,
    VALUE_HEADS,
    Tensors,
    text_config,
    write,
    write_shards,
)

NESTED = "model.language_model."


@dataclasses.dataclass(frozen=True)
class Read:
    """Everything that a checkpoint gave."""

    embed: Tensor
    norm: Tensor
    head: Tensor | None
    layers: list[LayerWeights]
    mtp: MtpWeights | None


def read(folder: Path) -> Read:
    config = load_config(folder)
    with Checkpoint(folder, config) as checkpoint:
        got = Read(
            checkpoint.embed(),
            checkpoint.norm(),
            checkpoint.lm_head(),
            [checkpoint.layer(i) for i in range(len(config.layer_kinds))],
            checkpoint.mtp(),
        )
        checkpoint.finish()
    return got


def flat(value: Any) -> list[Any]:
    """All leaves of nested dataclasses and lists, in order."""
    if dataclasses.is_dataclass(value):
        fields = [getattr(value, field.name) for field in dataclasses.fields(value)]
        return [leaf for field in fields for leaf in flat(field)]
    if isinstance(value, list):
        return [leaf for item in value for leaf in flat(item)]
    return [value]


def assert_same(got: Any, want: Any) -> None:
    """Equal in every bit, type and shape."""
    got, want = flat(got), flat(want)
    assert len(got) == len(want)
    for mine, theirs in zip(got, want, strict=True):
        if isinstance(theirs, Tensor):
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs)
        else:
            assert mine == theirs


def dense(folder: Path, tensors: dict[str, Tensor], **changes: Any) -> Path:
    return write(folder, text_config("qwen3_5", **changes), tensors)


def gdn(layer: LayerWeights) -> GdnWeights:
    assert isinstance(layer.mixer, GdnWeights)
    return layer.mixer


def test_a_gdn_layer(tmp_path: Path) -> None:
    t = Tensors().trunk()
    got = read(dense(tmp_path, t)).layers[1]
    base = "model.layers.1."
    assert torch.equal(got.input_norm, 1 + t[base + "input_layernorm.weight"])
    assert torch.equal(got.post_norm, 1 + t[base + "post_attention_layernorm.weight"])
    base += "linear_attn."
    rows = [t[f"{base}in_proj_{name}.weight"] for name in ("qkv", "z", "b", "a")]
    assert torch.equal(gdn(got).in_proj, torch.cat(rows))
    assert torch.equal(gdn(got).conv, t[base + "conv1d.weight"].reshape(CONV, 4))
    assert torch.equal(gdn(got).norm, t[base + "norm.weight"]), "a plain scale, not 1 + w"
    assert torch.equal(gdn(got).out_proj, t[base + "out_proj.weight"])


def test_interleaved_rows_are_sorted_head_by_head(tmp_path: Path) -> None:
    t = Tensors(moe=True).trunk(interleaved=True)
    got = gdn(read(write(tmp_path, text_config("qwen3_next"), t)).layers[0]).in_proj
    base = "model.layers.0.linear_attn."
    qkvz, ba = t[base + "in_proj_qkvz.weight"], t[base + "in_proj_ba.weight"]
    ratio = VALUE_HEADS // KEY_HEADS
    per_head = 2 * KEY_DIM + 2 * ratio * VALUE_DIM
    parts: dict[str, list[Tensor]] = {name: [] for name in "qkvzba"}
    for head in range(KEY_HEADS):
        row = head * per_head
        for name, size in zip("qkvz", [KEY_DIM] * 2 + [ratio * VALUE_DIM] * 2, strict=True):
            parts[name].append(qkvz[row : row + size])
            row += size
        parts["b"].append(ba[2 * ratio * head : 2 * ratio * head + ratio])
        parts["a"].append(ba[2 * ratio * head + ratio : 2 * ratio * (head + 1)])
    assert torch.equal(got, torch.cat([row for name in "qkvzba" for row in parts[name]]))


def test_qwen3_next_may_also_be_split(tmp_path: Path) -> None:
    t = Tensors(moe=True).trunk()
    got = read(write(tmp_path, text_config("qwen3_next"), t))
    names = [f"model.layers.0.linear_attn.in_proj_{name}.weight" for name in ("qkv", "z", "b", "a")]
    assert torch.equal(gdn(got.layers[0]).in_proj, torch.cat([t[name] for name in names]))


def test_q_and_gate_are_split_per_head(tmp_path: Path) -> None:
    t = Tensors().trunk()
    mixer = read(dense(tmp_path, t)).layers[3].mixer
    assert isinstance(mixer, AttentionWeights)
    base = "model.layers.3.self_attn."
    q = t[base + "q_proj.weight"]
    heads = [q[2 * HEAD_DIM * h : 2 * HEAD_DIM * (h + 1)] for h in range(HEADS)]
    want = [head[:HEAD_DIM] for head in heads] + [head[HEAD_DIM:] for head in heads]
    want += [t[base + "k_proj.weight"], t[base + "v_proj.weight"]]
    assert torch.equal(mixer.qkv_proj, torch.cat(want))
    assert torch.equal(mixer.o_proj, t[base + "o_proj.weight"])
    assert torch.equal(mixer.q_norm, 1 + t[base + "q_norm.weight"])
    assert torch.equal(mixer.k_norm, 1 + t[base + "k_norm.weight"])


def test_a_dense_mlp_has_its_gate_first(tmp_path: Path) -> None:
    t = Tensors().trunk()
    got = read(dense(tmp_path, t))
    base = "model.layers.2.mlp."
    mlp = got.layers[2].mlp
    assert isinstance(mlp, DenseMlpWeights)
    rows = (t[base + "gate_proj.weight"], t[base + "up_proj.weight"])
    assert torch.equal(mlp.gate_up, torch.cat(rows))
    assert torch.equal(mlp.down, t[base + "down_proj.weight"])
    assert torch.equal(got.norm, 1 + t["model.norm.weight"])
    assert torch.equal(got.embed, t["model.embed_tokens.weight"])
    assert got.head is not None
    assert torch.equal(got.head, t["lm_head.weight"])


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe"])
def test_fused_and_single_experts_are_the_same(tmp_path: Path, family: str) -> None:
    reads = []
    for fused in (True, False):
        tensors = Tensors(moe=True)
        tensors.trunk(interleaved=family == "qwen3_next", fused_experts=fused)
        tensors.mtp(fused_experts=fused)
        reads.append(read(write(tmp_path / str(fused), text_config(family), tensors.made)))
    assert_same(*reads)
    mlp = reads[0].layers[3].mlp
    assert isinstance(mlp, MoeWeights)
    base = "model.layers.3.mlp."
    assert torch.equal(mlp.gate_up, tensors_of(family)[base + "experts.gate_up_proj"])
    assert torch.equal(mlp.router, tensors_of(family)[base + "gate.weight"])
    shared = [tensors_of(family)[f"{base}shared_expert.{n}_proj.weight"] for n in ("gate", "up")]
    assert torch.equal(mlp.shared_gate_up, torch.cat(shared))


def tensors_of(family: str) -> dict[str, Tensor]:
    return Tensors(moe=True).trunk(interleaved=family == "qwen3_next")


def test_nested_names_with_a_vision_tower(tmp_path: Path) -> None:
    plain = read(dense(tmp_path / "plain", Tensors().trunk()))
    nested = Tensors(prefix=NESTED).trunk()
    nested["model.visual.blocks.0.attn.qkv.weight"] = torch.ones(3, 3)
    nested["model.visual.patch_embed.proj.bias"] = torch.ones(3, dtype=torch.int32)
    config = {
        "model_type": "qwen3_5",
        "text_config": text_config("qwen3_5_text"),
        "vision_config": {},
    }
    assert_same(read(write(tmp_path / "nested", config, nested)), plain)


def test_the_drafter(tmp_path: Path) -> None:
    tensors = Tensors()
    tensors.trunk()
    t = tensors.mtp()
    got = read(dense(tmp_path, t)).mtp
    assert got is not None
    assert torch.equal(got.fc, t["mtp.fc.weight"])
    assert torch.equal(got.norm_embedding, 1 + t["mtp.pre_fc_norm_embedding.weight"])
    assert torch.equal(got.norm_hidden, 1 + t["mtp.pre_fc_norm_hidden.weight"])
    assert torch.equal(got.norm, 1 + t["mtp.norm.weight"])
    assert isinstance(got.layer.mixer, AttentionWeights)
    o_proj = t["mtp.layers.0.self_attn.o_proj.weight"]
    assert torch.equal(got.layer.mixer.o_proj, o_proj)


def test_a_drafter_that_the_config_denies_is_unknown(tmp_path: Path) -> None:
    tensors = Tensors()
    tensors.trunk()
    folder = dense(tmp_path, tensors.mtp(), mtp_num_hidden_layers=0)
    with pytest.raises(ModelFormatError, match=r"15 tensors .* mtp\.fc\.weight"):
        read(folder)


def test_a_promised_drafter_that_a_saver_dropped_is_no_drafter(tmp_path: Path) -> None:
    assert read(dense(tmp_path, Tensors().trunk(), mtp_num_hidden_layers=1)).mtp is None


def test_half_a_drafter_is_refused(tmp_path: Path) -> None:
    tensors = Tensors()
    tensors.trunk()
    whole = tensors.mtp() and tensors.made
    del whole["mtp.fc.weight"]
    folder = dense(tmp_path, whole, mtp_num_hidden_layers=1)
    with pytest.raises(ModelFormatError, match=r"lacks mtp\.fc\.weight \[8, 16\]"):
        read(folder)


@pytest.mark.parametrize("written", [True, False])
def test_a_tied_head_with_and_without_a_written_copy(tmp_path: Path, written: bool) -> None:
    t = Tensors().trunk()
    t["lm_head.weight"] = t["model.embed_tokens.weight"].clone()
    if not written:
        del t["lm_head.weight"]
    assert read(dense(tmp_path, t, tie_word_embeddings=True)).head is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_any_float_is_read_and_decay_and_norms_become_float32(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    t = {name: tensor.to(dtype) for name, tensor in Tensors().trunk().items()}
    got = read(dense(tmp_path, t))
    layer, base = got.layers[0], "model.layers.0.linear_attn."
    for mine, name in ((gdn(layer).a_log, "A_log"), (gdn(layer).dt_bias, "dt_bias")):
        assert mine.dtype is torch.float32
        assert torch.equal(mine, t[base + name].float())
    assert gdn(layer).in_proj.dtype is dtype
    for scale in (got.norm, layer.input_norm, layer.post_norm, gdn(layer).norm):
        assert scale.dtype is torch.float32
    # In the stored type 1 + w would lose bits of w.
    assert torch.equal(got.norm, 1 + t["model.norm.weight"].float())


def test_shards(tmp_path: Path) -> None:
    t = Tensors().trunk()
    write_shards(tmp_path / "shards", text_config("qwen3_5"), t)
    assert_same(read(tmp_path / "shards"), read(dense(tmp_path / "one", t)))


def test_progress_counts_every_byte_that_is_read(tmp_path: Path) -> None:
    t = Tensors(prefix=NESTED).trunk()
    t["model.visual.x"] = torch.ones(1000)
    folder = dense(tmp_path, t)
    seen: list[tuple[int, int]] = []
    config = load_config(folder)
    with Checkpoint(folder, config, lambda done, total: seen.append((done, total))) as checkpoint:
        checkpoint.embed()
        checkpoint.norm()
        checkpoint.lm_head()
        for index in range(LAYERS):
            checkpoint.layer(index)
    total = sum(x.nbytes for name, x in t.items() if "visual" not in name)
    assert len(seen) == len(t) - 1
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


NAMES = sorted(Tensors().trunk())


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    t = Tensors().trunk()
    del t[name]
    with pytest.raises(ModelFormatError, match=rf"lacks {name} \["):
        read(dense(tmp_path, t))


@pytest.mark.parametrize("name", NAMES)
def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path: Path, name: str) -> None:
    t = Tensors().trunk()
    want = list(t[name].shape)
    t[name] = torch.ones(want[0] + 1, *want[1:])
    words = rf"{name} has shape \[{want[0] + 1}.*the config asks for \[{want[0]}"
    with pytest.raises(ModelFormatError, match=words):
        read(dense(tmp_path, t))


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.linear_attn.in_proj_qkv.bias",
        "model.layers.4.input_layernorm.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.embed_tokens.weight_scale",
        "mtp_extra",
        "visualise",
    ],
)
def test_an_unknown_tensor_is_named(tmp_path: Path, name: str) -> None:
    t = Tensors().trunk() | {name: torch.ones(2)}
    with pytest.raises(ModelFormatError, match=f"1 tensors that this model does not know: {name}"):
        read(dense(tmp_path, t))


def test_many_unknown_tensors_are_counted(tmp_path: Path) -> None:
    t = Tensors().trunk() | {f"extra.{n:02}": torch.ones(1) for n in range(20)}
    with pytest.raises(ModelFormatError, match=r"20 tensors .*: extra\.00, extra\.01, extra\.02$"):
        read(dense(tmp_path, t))


@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]
)
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.linear_attn.A_log"])
def test_what_is_no_plain_float_is_named(tmp_path: Path, dtype: torch.dtype, name: str) -> None:
    t = Tensors().trunk()
    t[name] = torch.ones_like(t[name]).to(dtype)
    with pytest.raises(ModelFormatError, match=f"{name} has dtype .*only floats are served"):
        read(dense(tmp_path, t))


def test_names_of_another_family_are_missing_ones(tmp_path: Path) -> None:
    t = Tensors().trunk(interleaved=True)
    with pytest.raises(ModelFormatError, match=r"lacks model\.layers\.0.*in_proj_qkv\.weight"):
        read(dense(tmp_path, t))


def test_one_missing_expert_is_named(tmp_path: Path) -> None:
    t = Tensors(moe=True).trunk(fused_experts=False)
    del t["model.layers.2.mlp.experts.1.up_proj.weight"]
    with pytest.raises(ModelFormatError, match=r"lacks .*experts\.1\.up_proj\.weight \[5, 8\]"):
        read(write(tmp_path, text_config("qwen3_5_moe"), t))


def test_a_folder_without_weights(tmp_path: Path) -> None:
    folder = dense(tmp_path, Tensors().trunk())
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelFormatError, match="holds no safetensors file with weights"):
        read(folder)


def test_a_file_that_goes_bad_between_header_and_data(tmp_path: Path) -> None:
    t = Tensors().trunk()
    folder = dense(tmp_path, t)
    config = load_config(folder)
    with Checkpoint(folder, config) as checkpoint:
        file = folder / "model.safetensors"
        file.unlink()
        with pytest.raises(ModelFormatError, match=r"cannot be read at model\.norm\.weight"):
            checkpoint.norm()
        save_file({"other": torch.ones(2)}, file)
        with pytest.raises(ModelFormatError, match=r"cannot be read at model\.embed_tokens"):
            checkpoint.embed()


def test_the_weights_outlive_their_file(tmp_path: Path) -> None:
    """A file that is rewritten in place must not change, or kill, an engine that runs."""
    t = Tensors().trunk()
    folder = dense(tmp_path, t)
    got = read(folder)
    file = folder / "model.safetensors"
    # Same inode and size, so that a mapping would see other bytes and not a signal.
    file.write_bytes(bytes(file.stat().st_size))
    assert got.head is not None
    assert torch.equal(got.head, t["lm_head.weight"])
    assert torch.equal(got.embed, t["model.embed_tokens.weight"])
    assert torch.equal(gdn(got.layers[0]).a_log, t["model.layers.0.linear_attn.A_log"])
