"""Plans without a machine: parameters counted, limits found by search, modes side by side."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError, DoesNotFitError, ModelFormatError
from engine.reserve.memory import DeviceMemory, MemoryKind
from engine.reserve.parameters import (
    StoredTensor,
    resident_bytes,
    stored_bytes,
    tensors_of_config,
    tensors_of_headers,
)
from engine.reserve.plan import PlanCase, plan_case, plan_limits, read_model, rollback_modes
from engine.reserve.preflight import Preflight
from engine.reserve.ssm_reserve import SpeculationPolicy, SsmRollbackMode
from engine.weights.headers import tensor_headers
from engine.weights.model_config import parse_config
from kernels.cpu_features import BYTES
from tests.engine.tiny_weights import Tensors, text_config, write_shards

TINY = Path(__file__).resolve().parents[2] / "spark_server" / "assets" / "spark-tiny"
CONFIG = EngineConfig("model", max_batch_size=8, max_seq_len=1024)
GIB = 2**30


def memory(total: int, kind: MemoryKind = MemoryKind.HOST, reserve: int = 0) -> DeviceMemory:
    return DeviceMemory(kind, total, total, reserve)


def plan(source: Path, config: EngineConfig, **rest: Any) -> Preflight:
    return plan_case(source, config, memory(8 * GIB), **rest).preflight()


QWEN_27B: dict[str, Any] = {
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
        "mtp_num_hidden_layers": 1,
        "dtype": "bfloat16",
    },
}
QWEN_35B_MOE: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text",
    "vocab_size": 248320,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "mtp_num_hidden_layers": 1,
}


def drafter_of(config: dict[str, Any]) -> list[StoredTensor]:
    return [t for t in tensors_of_config(parse_config(config)) if t.name.startswith("mtp.")]


def test_the_count_equals_the_headers_of_the_packaged_model() -> None:
    found = tensors_of_headers(tensor_headers(TINY))
    counted = tensors_of_config(read_model(TINY))

    def shapes(tensors: tuple[StoredTensor, ...]) -> Counter[tuple[str, tuple[int, ...], int]]:
        flat = ((t.name.replace("language_model.", ""), t.shape, t.nbytes) for t in tensors)
        return Counter(flat)

    assert shapes(found) == shapes(counted)
    assert stored_bytes(found) == stored_bytes(counted)


def test_a_drafter_has_15_tensors_and_19_with_experts() -> None:
    assert len(drafter_of(QWEN_27B)) == 15
    assert len(drafter_of(QWEN_35B_MOE)) == 19


def test_27b_has_its_published_size() -> None:
    tensors = tensors_of_config(parse_config(QWEN_27B))
    shapes = {t.name: t.shape for t in tensors}
    base = "model.language_model.layers."
    assert shapes[base + "0.linear_attn.in_proj_qkv.weight"] == (10240, 5120)
    assert shapes[base + "0.linear_attn.conv1d.weight"] == (10240, 1, 4)
    assert shapes[base + "3.self_attn.q_proj.weight"] == (12288, 5120)
    assert shapes["mtp.fc.weight"] == (5120, 10240)
    trunk = sum(t.elements for t in tensors if not t.name.startswith("mtp."))
    assert trunk == 26_895_998_464


@pytest.mark.parametrize(
    ("changes", "shared"),
    [
        ({"device": "cuda", "dtype": "bfloat16"}, True),
        ({"device": "cuda", "dtype": "float16"}, False),
        ({"kernels": "naive", "dtype": "bfloat16"}, True),
        ({"kernels": "naive"}, False),
        ({}, False),
    ],
)
def test_a_tied_head_is_no_second_matrix_where_it_is_used_as_it_is_read(
    changes: dict[str, Any], shared: bool
) -> None:
    tied = dict(QWEN_27B, text_config=dict(QWEN_27B["text_config"], tie_word_embeddings=True))
    head = 248320 * 5120
    models = [parse_config(tied), parse_config(QWEN_27B)]
    one, two = (stored_bytes(tensors_of_config(model)) for model in models)
    assert two - one == 2 * head
    config = replace(CONFIG, **changes)
    tying, untied = (
        resident_bytes(tensors_of_config(model), model, config, with_mtp=True) for model in models
    )
    assert untied - tying == (2 * head if shared else 0)


def test_a_small_drafter_on_a_cpu_is_kept_twice() -> None:
    """In tiles too, with the tied head, for the kernel that drafts in one call."""
    model = read_model(TINY)
    tensors = tensors_of_config(model)
    matrices = [
        t.elements
        for t in tensors
        if t.name.startswith("mtp.") and len(t.shape) == 2 and "conv1d" not in t.name
    ]
    assert len(matrices) == 8
    drafter = [t for t in tensors if t.name.startswith("mtp.")]
    once = sum(t.elements * (2 if len(t.shape) == 2 else 4) for t in drafter)
    with_it, without = (
        resident_bytes(tensors, model, CONFIG, with_mtp=mtp) for mtp in (True, False)
    )
    head = model.vocab_size * model.hidden_size
    copied = sum(matrices) + head
    if BYTES:
        rows = sum(t.shape[0] for t in drafter if len(t.shape) == 2) + model.vocab_size
        assert with_it - without == once + copied + 4 * rows
    else:
        assert with_it - without == once + 2 * copied
    large = parse_config(QWEN_27B)
    whole = [
        resident_bytes(tensors_of_config(large), large, CONFIG, with_mtp=mtp)
        for mtp in (True, False)
    ]
    assert whole[0] - whole[1] == sum(
        t.elements * (2 if len(t.shape) == 2 else 4) for t in drafter_of(QWEN_27B)
    )


@pytest.mark.parametrize(
    ("stored", "config", "width"),
    [
        ("F16", CONFIG, 2),
        ("BF16", CONFIG, 2),
        ("F32", CONFIG, 4),
        ("F16", replace(CONFIG, kernels="naive"), 4),
        ("BF16", replace(CONFIG, device="cuda", dtype="bfloat16"), 2),
    ],
)
def test_packed_matrices(stored: str, config: EngineConfig, width: int) -> None:
    model = read_model(TINY)
    tensors = [StoredTensor("model.layers.0.mlp.up_proj.weight", (10, 7), stored)]
    assert resident_bytes(tensors, model, config, with_mtp=False) == 70 * width


def test_what_is_not_loaded_takes_nothing() -> None:
    model = read_model(TINY)
    tensors = [StoredTensor("mtp.fc.weight", (8, 16), "F32")]
    assert resident_bytes(tensors, model, CONFIG, with_mtp=False) == 0
    assert resident_bytes(tensors, model, CONFIG, with_mtp=True) == 512
    headers = tensor_headers(TINY)
    seen = {"model.visual.patch": next(iter(headers.values()))}
    assert tensors_of_headers(seen) == ()


def test_a_config_alone_plans_as_the_folder_does(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((TINY / "config.json").read_text())
    plans = [
        plan(source, CONFIG, policy=SpeculationPolicy(3))
        for source in (TINY, tmp_path, tmp_path / "config.json", TINY / "config.json")
    ]
    assert all(found == plans[0] for found in plans)
    assert plans[0].budget == 4 * GIB


def test_weights_bytes_stand_in_and_a_budget_wins() -> None:
    config = replace(CONFIG, memory_budget=3 * GIB)
    found = plan(TINY, config, share=0.1, weights_bytes=12345678)
    assert found.ledger.bytes_of("weights") == 12345678
    assert found.budget == 3 * GIB


def test_plans_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="5000 exceeds the 4096 positions"):
        plan(TINY, replace(CONFIG, max_seq_len=5000))
    silent = json.loads((TINY / "config.json").read_text())
    silent["mtp_num_hidden_layers"] = 0
    path = tmp_path / "config.json"
    path.write_text(json.dumps(silent))
    with pytest.raises(ConfigError, match="MTP layers"):
        plan(path, CONFIG, policy=SpeculationPolicy(1))
    path.write_text("[1]")
    with pytest.raises(ModelFormatError, match="no JSON object"):
        read_model(path)
    with pytest.raises(ModelFormatError, match="does not exist"):
        read_model(tmp_path / "nowhere")


def fits(case: PlanCase, share: float | None = None, **changes: int) -> bool:
    """Through the whole preflight, as a start would."""
    share = case.share if share is None else share
    try:
        replace(case, share=share, config=replace(case.config, **changes)).preflight()
    except DoesNotFitError:
        return False
    return True


@pytest.mark.parametrize("mode", list(SsmRollbackMode))
@pytest.mark.parametrize("total", [4 * GIB, 40 * GIB])
def test_every_limit_fits_and_one_more_does_not(mode: SsmRollbackMode, total: int) -> None:
    policy = SpeculationPolicy(3, mode)
    case = plan_case(TINY, CONFIG, memory(total), share=0.3, policy=policy)
    limits = plan_limits(case)
    assert limits.max_batch_size is not None
    assert fits(case, max_batch_size=limits.max_batch_size)
    if limits.max_batch_size < 4096:
        assert not fits(case, max_batch_size=limits.max_batch_size + 1)
    assert limits.max_seq_len == 4096, "what the model allows"
    assert limits.lowest_share is not None
    assert fits(case, limits.lowest_share)
    assert not fits(case, limits.lowest_share - 0.01)
    assert limits.highest_share == 1.0


def test_the_longest_length_is_searched_token_by_token(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN_35B_MOE | {"max_position_embeddings": 262144}))
    config = replace(CONFIG, device="cuda", dtype="bfloat16")
    case = plan_case(path, config, memory(80 * GIB, MemoryKind.DEVICE), share=0.88)
    longest = plan_limits(case).max_seq_len
    assert longest is not None
    assert 1024 < longest < 262144
    assert fits(case, max_seq_len=longest)
    assert not fits(case, max_seq_len=longest + 1)


def test_where_nothing_fits_there_are_no_limits() -> None:
    limits = plan_limits(plan_case(TINY, CONFIG, memory(300 * 2**20)))
    assert (limits.max_batch_size, limits.max_seq_len, limits.lowest_share) == (None, None, None)


def test_what_others_hold_and_the_host_keeps_bounds_the_share() -> None:
    crowded = DeviceMemory(MemoryKind.HOST, 10 * GIB, 7 * GIB, 2 * GIB)
    limits = plan_limits(plan_case(TINY, CONFIG, crowded))
    assert limits.highest_share == 0.5


def test_modes_side_by_side_are_the_plans_of_each() -> None:
    case = plan_case(TINY, CONFIG, memory(8 * GIB), policy=SpeculationPolicy(2))
    found = {mode.mode: mode for mode in rollback_modes(case, lambda mtp: 1000 + mtp)}
    assert list(found) == ["off", "carry", "replay", "snapshot"]
    for mode in SsmRollbackMode:
        one = plan(TINY, CONFIG, policy=SpeculationPolicy(2, mode), weights_bytes=1001)
        assert found[mode.value].kv_tokens == one.kv_tokens
        pages = one.ledger.bytes_of("kv_pool") + one.ledger.bytes_of("kv_dummy")
        assert found[mode.value].without_kv == one.ledger.total - pages
    off = plan(TINY, CONFIG, weights_bytes=1000)
    pages = off.ledger.bytes_of("kv_pool") + off.ledger.bytes_of("kv_dummy")
    assert found["off"].without_kv == off.ledger.total - pages
    assert found["off"].without_kv < found["carry"].without_kv < found["replay"].without_kv


def test_a_model_without_a_drafter_has_no_modes(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    silent = json.loads((TINY / "config.json").read_text()) | {"mtp_num_hidden_layers": 0}
    path.write_text(json.dumps(silent))
    assert rollback_modes(plan_case(path, CONFIG, memory(8 * GIB)), lambda mtp: 1) == ()


def test_a_folder_that_lacks_a_shard_is_refused_and_its_config_alone_is_not(
    tmp_path: Path,
) -> None:
    tensors = Tensors()
    tensors.trunk()
    folder = tmp_path / "model"
    files = write_shards(folder, text_config("qwen3_5"), tensors.made)
    config = replace(CONFIG, max_seq_len=128)
    assert plan(folder, config)
    for missing in files:
        missing.unlink()
        words = r"lacks \d of 2 files .*-of-00002.* or plan without its weights from .*config.json"
        with pytest.raises(ModelFormatError, match=words):
            plan(folder, config)
    assert plan(folder / "config.json", config)
