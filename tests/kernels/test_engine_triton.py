"""The whole engine on Triton kernels: the tokens of plain torch, with drafts and in any company."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.build import BuiltEngine, build_engine
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.model.hybrid import HybridModel
from engine.pools.buffers import StepBuffers
from engine.request import GenerationRequest, SamplingParams
from engine.reserve.graphs import graph_buckets
from engine.reserve.ssm_reserve import SsmRollbackMode
from engine.speculation.policy import ControllerMode, PolicySettings
from kernels.ops import chosen, triton_ops
from tests.engine import tiny_weights
from tests.engine.tiny_weights import VOCAB, Tensors, text_config, write

# A GDN and an attention layer with heads of 16, the least that the kernels take.
SIZES = {
    "LAYERS": 2,
    "HIDDEN": 16,
    "HEAD_DIM": 16,
    "KEY_HEADS": 1,
    "VALUE_HEADS": 2,
    "KEY_DIM": 16,
    "VALUE_DIM": 16,
    "CONV": 2 * 16 + 2 * 16,
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = (1, 5, 11)


@pytest.fixture(scope="module", params=["dense", "moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SIZES.items():
            patch.setattr(tiny_weights, name, value)
        moe = request.param == "moe"
        tensors = Tensors(moe=moe, every=2)
        tensors.trunk()
        config = text_config("qwen3_5_moe" if moe else "qwen3_5", full_attention_interval=2)
        path = tmp_path_factory.mktemp("triton") / request.param
        return write(path, config, tensors.mtp())


def build(folder: Path, kernels: str, mode: SsmRollbackMode | None, **fields: Any) -> BuiltEngine:
    speculation = None
    if mode is not None:
        speculation = PolicySettings(2, mode, controller=ControllerMode.OFF)
    values: dict[str, Any] = {
        "device": DEVICE,
        "max_batch_size": 3,
        "max_seq_len": 40,
        "memory_budget": 2**30,
        "threads": 1,
        "kernels": kernels,
        "batch_invariant": True,
        "speculation": speculation,
    }
    config = EngineConfig(str(folder), **(values | fields))
    return build_engine(config, lambda phase, seconds, detail="": None)


def answers(built: BuiltEngine, lengths: tuple[int, ...] = LENGTHS) -> list[tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    for number, length in enumerate(lengths):
        prompt = tuple((7 * length + 3 * i) % VOCAB for i in range(length))
        params = SamplingParams(max_tokens=4, temperature=6.0, seed=length, ignore_eos=True)
        built.core.add(GenerationRequest(number, prompt, params))
        found[number] = ()
    while built.core.has_work():
        for delta in built.core.step():
            assert delta.error is None
            found[delta.request_id] += delta.token_ids
    return list(found.values())


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[tuple[int, ...]]:
    """What plain torch answers."""
    found = answers(build(folder, "naive", None))
    assert len({token for answer in found for token in answer}) > 3
    return found


@pytest.fixture(autouse=True)
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter compiles nothing, and a warm-up takes it half a minute."""
    monkeypatch.setattr("engine.build.warm_up", lambda *args: None)


def test_the_tokens_are_those_of_plain_torch_in_any_company(
    folder: Path, expected: list[tuple[int, ...]]
) -> None:
    if folder.name == "moe":
        pytest.skip("the test with drafts runs the experts too")
    built = build(folder, "triton", None)
    assert built.info.kernels == "triton"
    assert answers(built) == expected
    assert answers(built, LENGTHS[1:2]) == expected[1:2]


def test_drafts_change_no_token(folder: Path, expected: list[tuple[int, ...]]) -> None:
    built = build(folder, "triton", SsmRollbackMode.CARRY)
    assert answers(built) == expected
    stats = built.core.stats()
    assert stats.speculation is not None
    assert stats.speculation.verifies > 3


@pytest.mark.parametrize("mode", [SsmRollbackMode.SNAPSHOT, SsmRollbackMode.REPLAY])
def test_other_rollbacks_change_no_token(
    folder: Path, mode: SsmRollbackMode, expected: list[tuple[int, ...]]
) -> None:
    if folder.name == "moe":
        pytest.skip("the modes differ in GDN layers only")
    assert answers(build(folder, "triton", mode), LENGTHS[:2]) == expected[:2]


def test_replayed_steps_change_no_token(folder: Path, expected: list[tuple[int, ...]]) -> None:
    """As on a card, but that a replay runs the kernels again."""
    if folder.name == "moe":
        pytest.skip("padding reaches the experts as rows like others")
    built = build(folder, "triton", SsmRollbackMode.CARRY)
    if built.model.graphs is None:
        record(built.model, folder)
    assert answers(built) == expected


def record(model: HybridModel, folder: Path) -> None:
    config = EngineConfig(str(folder), max_batch_size=3, max_seq_len=40)
    buffers = StepBuffers(model.config, config, 9, torch.float32, torch.device("cpu"))
    buckets = [b for b in graph_buckets(3, 2, 9) if b.rows in (2, 4, 9)]
    model.capture(buckets, buffers, lambda run: run)


def test_every_operator_is_named() -> None:
    names = chosen(triton_ops(torch.bfloat16, batch_invariant=False))
    assert names.pop("linear") == "torch"
    assert names.pop("draft_chain") == "passes"
    assert set(names.values()) == {"triton"}
    assert {"gdn_mixer", "attention_mixer", "moe_mlp", "top1", "move_rows"} <= set(names)
    assert chosen(triton_ops(torch.bfloat16, batch_invariant=True))["linear"] == "triton"


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("head_dim", 24, ["attention_mixer", "float32", "head size 24", "16, 32, 64, 128, 256"]),
        ("linear_value_head_dim", 12, ["gdn_mixer", "head size 12", "16, 32, 64, 128, 256"]),
        ("linear_key_head_dim", 12, ["gdn_mixer", "head size 12"]),
        ("hidden_size", 2**16, ["add_rms_norm", "65536"]),
    ],
)
def test_a_model_without_kernels_is_refused_before_its_weights(
    tmp_path: Path, key: str, value: int, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = "engine.weights.loader.Checkpoint.__init__"
    monkeypatch.setattr(opened, lambda *args: pytest.fail("opened the weights"))
    sizes = {"head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    folder = write(tmp_path / "m", text_config("qwen3_5", **(sizes | {key: value})), {})
    with pytest.raises(ConfigError) as caught:
        build(folder, "triton", None)
    for word in [*words, "--kernels naive", "supported: "]:
        assert word in str(caught.value)


def test_a_dtype_without_kernels_is_refused(tmp_path: Path) -> None:
    from kernels.errors import UnsupportedKernelError
    from kernels.support import ModelSizes, check_triton

    sizes = ModelSizes(16, 16, 16, 16, 0, 16)
    with pytest.raises(UnsupportedKernelError, match="float64, head size 16, device cpu"):
        check_triton(sizes, torch.float64, torch.device("cpu"))
    check_triton(replace(sizes, key_width=0, value_width=0), torch.bfloat16, torch.device(DEVICE))
