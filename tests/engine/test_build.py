"""From a folder to a stepping engine: phases, refusals before the weights, the account of bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.build import BuiltEngine, build_engine, choose_ops
from engine.config import EngineConfig
from engine.errors import (
    ConfigError,
    DoesNotFitError,
    InvariantError,
    ModelFormatError,
    UnsupportedKernelError,
)
from engine.pools.state import SsmStatePool
from engine.request import FinishReason, GenerationRequest, SamplingParams
from engine.weights.loader import Checkpoint
from kernels.errors import UnsupportedKernelError as MissingKernelError
from tests.engine.tiny_weights import VOCAB, Tensors, text_config, write
from tests.processes import run_python

ROOT = Path(__file__).resolve().parent.parent.parent
BUDGET = 2 * 2**30


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors = Tensors()
    tensors.trunk()
    return write(tmp_path / "model", text_config("qwen3_5", eos_token_id=[2, 5]), tensors.mtp())


def config(folder: Path, **fields: Any) -> EngineConfig:
    values = {"max_seq_len": 128, "max_batch_size": 2, "threads": 1, "memory_budget": BUDGET}
    return EngineConfig(str(folder), **(values | fields))


def build(folder: Path, **fields: Any) -> tuple[BuiltEngine, list[tuple[str, float, str]]]:
    phases: list[tuple[str, float, str]] = []
    built = build_engine(
        config(folder, **fields),
        lambda phase, seconds, detail="": phases.append((phase, seconds, detail)),
    )
    return built, phases


def answer(built: BuiltEngine, prompt: tuple[int, ...], tokens: int = 6) -> tuple[int, ...]:
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    built.core.add(GenerationRequest(0, prompt, params))
    found: list[int] = []
    while built.core.has_work():
        for delta in built.core.step():
            assert delta.finish_reason in (None, FinishReason.LENGTH), delta.error
            found += delta.token_ids
    return tuple(found)


@pytest.mark.parametrize("kernels", ["naive", "cpu"])
def test_a_built_engine_answers(folder: Path, kernels: str) -> None:
    built, phases = build(folder, kernels=kernels)
    assert [name for name, _, _ in phases] == ["preflight", "pools", "weights", "warm-up"]
    assert all(seconds >= 0 for _, seconds, _ in phases)
    assert built.info.vocab_size == VOCAB
    assert built.info.eos_token_ids == (2, 5)
    assert built.info.kernels == kernels
    found = answer(built, (1, 2, 3))
    assert len(found) == 6
    assert all(0 <= token < VOCAB for token in found)
    assert answer(built, (1, 2, 3)) == found
    assert answer(build(folder, kernels="naive")[0], (1, 2, 3)) == found


def test_the_progress_of_the_weights_reaches_every_byte(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    build_engine(
        config(folder),
        lambda phase, seconds, detail="": None,
        lambda done, total: seen.append((done, total)),
    )
    assert seen[-1][0] == seen[-1][1]
    assert seen == sorted(seen)


def test_the_end_ids_of_the_model_end_a_sequence(folder: Path) -> None:
    built, _ = build(folder)
    token = answer(built, (1, 2, 3), 1)[0]
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": [{token}]}}')
    built, _ = build(folder)
    built.core.add(GenerationRequest(0, (1, 2, 3), SamplingParams(max_tokens=9, temperature=0.0)))
    deltas = []
    while built.core.has_work():
        deltas += built.core.step()
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert deltas[-1].stop_token_id == token


def test_the_ledger_is_what_was_reserved(folder: Path) -> None:
    built, _ = build(folder)
    assert built.ledger.ledger.total <= BUDGET
    assert built.core.stats().kv_blocks_total == built.ledger.kv_blocks == 4
    built, _ = build(folder, kv_tokens=192)
    assert built.core.stats().kv_blocks_total == 3


def test_too_small_a_budget_reads_no_weight(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkpoint, "__init__", lambda *args: pytest.fail("opened the weights"))
    phases: list[str] = []
    with pytest.raises(DoesNotFitError, match="the largest term is"):
        build_engine(
            config(folder, memory_budget=10**6),
            lambda phase, seconds, detail="": phases.append(phase),
        )
    assert phases == []


def test_an_open_budget_is_a_mistake_of_the_caller(folder: Path) -> None:
    with pytest.raises(ConfigError, match="budget is not resolved"):
        build(folder, memory_budget=None)


def test_pools_of_another_size_end_the_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = SsmStatePool.nbytes.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(SsmStatePool, "nbytes", property(lambda self: honest(self) + 4))
    with pytest.raises(InvariantError, match="state"):
        build(folder)


def test_a_kernel_that_is_missing_after_all_is_a_typed_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*args: object) -> None:
        raise MissingKernelError("moe_mlp", torch.float32, 3, "cpu", "none of this test")

    monkeypatch.setattr("engine.build.warm_up", missing)
    with pytest.raises(UnsupportedKernelError, match=r"moe_mlp .* head size 3, .* --kernels naive"):
        build(folder)


def test_a_broken_checkpoint_is_a_typed_error(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelFormatError, match="header promises"):
        build(folder)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({}, "cpu"),
        ({"kernels": "naive"}, "naive"),
        ({"dtype": "bfloat16"}, "naive"),
        ({"device": "cuda"}, "triton"),
    ],
)
def test_the_operators_follow_device_and_type(fields: dict[str, Any], name: str) -> None:
    assert choose_ops(replace(EngineConfig("x"), **fields)).name == name


def test_products_that_vary_are_refused_where_none_may() -> None:
    with pytest.raises(ConfigError, match=r"--batch-invariant on cuda .* use --kernels triton"):
        choose_ops(EngineConfig("x", device="cuda", kernels="naive", batch_invariant=True))


def test_triton_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.build.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="the package triton is not installed"):
        choose_ops(EngineConfig("x", device="cuda"))


@pytest.mark.parametrize("fields", [{"dtype": "bfloat16"}, {"device": "cuda"}])
def test_cpu_operators_that_cannot_run_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--kernels cpu runs float32 on a CPU"):
        choose_ops(replace(EngineConfig("x"), kernels="cpu", **fields))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_answers_too(folder: Path, dtype: str) -> None:
    built, _ = build(folder, dtype=dtype)
    found = answer(built, (1, 2, 3))
    assert len(found) == 6


def test_no_more_threads_than_asked_for(folder: Path) -> None:
    """numba starts its pool at the first kernel and then sets OpenMP, and so torch, to its own."""
    code = f"""
import torch
from engine.build import build_engine
from engine.config import EngineConfig
config = EngineConfig({str(folder)!r}, max_seq_len=128, max_batch_size=2, threads=1,
                      memory_budget={BUDGET})
build_engine(config, lambda phase, seconds, detail="": None)
print(torch.get_num_threads())
"""
    environ = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2", "NUMBA_NUM_THREADS": "2"}
    assert run_python(code, folder, **environ).split() == ["1"]


@pytest.mark.parametrize("kernels", ["cpu", "naive"])
def test_states_may_be_stored_in_float16(folder: Path, kernels: str) -> None:
    built, _ = build(folder, kernels=kernels, h_f16_pool=True)
    assert built.model.states.h.dtype == torch.float16
    assert len(answer(built, (1, 2, 3))) == 6
