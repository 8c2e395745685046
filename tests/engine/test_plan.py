"""`spark plan`, the count of parameters behind it, and that none of it needs torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError, DoesNotFitError, ModelFormatError
from engine.reserve.parameters import (
    StoredTensor,
    resident_bytes,
    stored_bytes,
    tensors_of_config,
    tensors_of_headers,
)
from engine.reserve.plan import main, plan, read_model
from engine.reserve.ssm_reserve import SpeculationPolicy
from engine.weights.headers import tensor_headers
from engine.weights.model_config import parse_config

TINY = Path(__file__).resolve().parents[2] / "spark_server" / "assets" / "spark-tiny"
CONFIG = EngineConfig("model", max_batch_size=8, max_seq_len=1024)
GIB = 2**30

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


def drafter(config: dict[str, Any]) -> list[StoredTensor]:
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
    assert len(drafter(QWEN_27B)) == 15
    assert len(drafter(QWEN_35B_MOE)) == 19


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


def test_tying_drops_the_head_from_the_file_and_packs_it_all_the_same() -> None:
    tied = dict(QWEN_27B, text_config=dict(QWEN_27B["text_config"], tie_word_embeddings=True))
    head = 248320 * 5120
    models = [parse_config(tied), parse_config(QWEN_27B)]
    one, two = (stored_bytes(tensors_of_config(model)) for model in models)
    assert two - one == 2 * head
    cuda = replace(CONFIG, device="cuda", dtype="bfloat16")
    resident = [
        resident_bytes(tensors_of_config(model), model, cuda, with_mtp=True) for model in models
    ]
    assert resident[0] == resident[1]


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
        plan(source, CONFIG, device_memory=8 * GIB, policy=SpeculationPolicy(3))
        for source in (TINY, tmp_path, tmp_path / "config.json", TINY / "config.json")
    ]
    assert all(found == plans[0] for found in plans)
    assert plans[0].budget == 4 * GIB


def test_weights_bytes_stand_in_and_a_budget_wins() -> None:
    config = replace(CONFIG, memory_budget=3 * GIB)
    found = plan(TINY, config, device_memory=8 * GIB, utilisation=0.1, weights_bytes=12345678)
    assert found.ledger.bytes_of("weights") == 12345678
    assert found.budget == 3 * GIB


def test_plans_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="5000 exceeds the 4096 positions"):
        plan(TINY, replace(CONFIG, max_seq_len=5000), device_memory=8 * GIB)
    silent = json.loads((TINY / "config.json").read_text())
    silent["mtp_num_hidden_layers"] = 0
    path = tmp_path / "config.json"
    path.write_text(json.dumps(silent))
    with pytest.raises(ConfigError, match="MTP layers"):
        plan(path, CONFIG, device_memory=8 * GIB, policy=SpeculationPolicy(1))
    path.write_text("[1]")
    with pytest.raises(ModelFormatError, match="no JSON object"):
        read_model(path)
    with pytest.raises(ModelFormatError, match="does not exist"):
        read_model(tmp_path / "nowhere")


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["spark-tiny", "--device-memory", "8GiB", "--max-batch-size", "64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["term", "bytes", "size", "kind", "what"]
    ends = {line.index("exact") for line in lines if " exact " in line}
    assert len(ends) == 1
    words = {line.split()[0]: line.split() for line in lines}
    assert words["state_pool"][1] == str(64 * 221184)
    assert words["budget"][1] == str(4 * GIB)
    assert int(words["total"][1]) + int(words["free"][1]) == 4 * GIB


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(TINY), "--memory-budget", "2GiB", "--num-drafts", "3", "--json"]
    assert main(words) == 0
    parsed = json.loads(capsys.readouterr().out)
    assert parsed["budget_bytes"] == 2 * GIB
    assert {"weights", "carry_ring", "kv_pool"} <= {t["name"] for t in parsed["terms"]}


def plan_27b(path: Path, mode: str, capsys: pytest.CaptureFixture[str]) -> dict[str, int]:
    path.write_text(json.dumps(QWEN_27B))
    words = "--device cuda --device-memory 121.7GiB --gpu-memory-utilization 0.7 --snapshots 16 "
    words += "--weights-bytes 39.8GiB --max-batch-size 128 --num-drafts 3 --json "
    assert main([str(path), *words.split(), "--ssm-rollback-mode", mode]) == 0
    parsed = json.loads(capsys.readouterr().out)
    assert parsed["total_bytes"] <= parsed["budget_bytes"] == 91_472_065_986
    return {term["name"]: term["bytes"] for term in parsed["terms"]}


def test_rollback_modes_of_27b(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    carry, replay, snapshot = (
        plan_27b(path, mode, capsys) for mode in ("carry", "replay", "snapshot")
    )
    for terms in (carry, replay, snapshot):
        assert terms["state_pool"] == 128 * 158_859_264
        assert terms["snapshots"] == 16 * 158_859_264
    # The engine keeps its rings in float32: rows of 41,344 and of 65,920 bytes.
    assert carry["carry_ring"] == 32 * 3 * 48 * 41_344
    assert carry["carry_ring_dummy"] == 3 * 48 * 41_344
    assert replay["verify_pool"] == 32 * 158_859_264
    assert replay["replay_ring"] == 32 * 3 * 48 * 65_920
    assert replay["replay_ring_dummy"] == 3 * 48 * 65_920
    assert snapshot["verify_pool"] == 33_671_872_512 - 128 * 158_859_264
    assert snapshot["verify_dummy"] == 158_859_264 + 3 * 150_994_944 + 4 * 7_864_320
    assert carry["kv_pool"] > replay["kv_pool"] > snapshot["kv_pool"] > 0


@pytest.mark.parametrize(
    ("words", "error", "text"),
    [
        (["--device-memory", "600MiB"], DoesNotFitError, "largest term is process_baseline"),
        (["--device", "cuda"], ConfigError, "--device-memory"),
        (["--device-memory", "80%"], ConfigError, "--gpu-memory-utilization 0.8"),
        (["--max-prefill-tokens", "63"], ConfigError, "63 is below 64"),
    ],
)
def test_the_command_refuses(words: list[str], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        main(["spark-tiny", *words])


@pytest.mark.parametrize("words", [["--num-drafts", "x"], ["--max-seq-len", "0"], []])
def test_words_that_are_no_command_end_with_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words, "spark-tiny"] if words else [])
    assert ended.value.code == 2


def test_planning_needs_neither_torch_nor_numba_nor_the_server() -> None:
    code = (
        "import sys, engine.reserve.plan as p\n"
        "p.main(['spark-tiny', '--device-memory', '8GiB'])\n"
        "bad = {'torch', 'numba', 'numpy', 'safetensors', 'spark_server', 'pydantic'}\n"
        "sys.exit(', '.join(bad & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
