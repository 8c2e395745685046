"""What `auto` becomes, and that every setting of the engine reaches its configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError, DoesNotFitError, ModelFormatError
from engine.reserve.memory import DeviceMemory, MemoryKind
from engine.reserve.ssm_reserve import SsmRollbackMode
from engine.reserve.terms import CUDA_CONTEXT
from engine.speculation.policy import PolicySettings
from spark_server import resolve
from spark_server.model_source import locate_model
from spark_server.resolve import check_early, engine_config, finish_config
from spark_server.settings import load_settings

GIB = 2**30
TINY = locate_model("spark-tiny").folder


def config_of(*argv: str) -> tuple[EngineConfig, list[str]]:
    return engine_config(load_settings(argv, {}).settings, TINY)


def test_auto_says_what_it_became() -> None:
    config, notes = config_of()
    assert config.max_seq_len <= 4096
    assert config.threads >= 1
    assert (config.device, config.dtype, config.kernels) == ("auto", "auto", "auto")
    assert (config.memory_budget, config.kv_tokens) == (None, None)
    assert [note.split(" is ")[0] for note in notes] == ["max-seq-len auto", "threads auto"]


def test_every_setting_arrives() -> None:
    config, notes = config_of(
        *("--device", "cpu", "--dtype", "bfloat16", "--max-batch-size", "3", "--max-seq-len", "77"),
        *("--max-prefill-tokens", "200", "--max-waiting", "5", "--memory-budget", "1GiB"),
        *("--kv-tokens", "640", "--threads", "2", "--kernels", "naive"),
        *("--batch-invariant", "--enforce-eager"),
        *("--ssm-cache-slots", "5", "--no-prefix-cache-exact"),
    )
    assert config == EngineConfig(
        model_dir=TINY,
        device="cpu",
        dtype="bfloat16",
        max_batch_size=3,
        max_seq_len=77,
        max_prefill_tokens=192,
        max_waiting=5,
        memory_budget=2**30,
        kv_tokens=640,
        threads=2,
        kernels="naive",
        batch_invariant=True,
        enforce_eager=True,
        prefix_caching=True,
        snapshot_slots=5,
        prefix_cache_exact=False,
    )
    assert notes == []
    finished, notes = finish_config(config)
    assert finished.device_memory is not None
    assert (replace(finished, device_memory=None), notes) == (config, [])


@pytest.mark.parametrize("usable", [{0}, {0, 3, 5, 6}])
def test_auto_threads_are_the_usable_cpus(
    usable: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: usable)
    config, notes = config_of()
    assert config.threads == len(usable)
    assert f"threads auto is {len(usable)}, the CPUs that this process may use" in notes


def test_speculation_reaches_the_engine() -> None:
    assert config_of()[0].speculation is None
    config, _ = config_of("--speculative", "--num-drafts", "2", "--ssm-rollback-mode", "replay")
    assert config.speculation == PolicySettings(num_drafts=2, rollback=SsmRollbackMode.REPLAY)
    assert config.speculation.recurrent, "spark-tiny has Gated DeltaNet layers"


@pytest.mark.parametrize("speculate", [(), ("--speculative",)])
@pytest.mark.parametrize(("protocol", "moves"), [("v2", False), ("v1", True), ("", True)])
def test_the_second_protocol_pins_slots(
    protocol: str, moves: bool, speculate: tuple[str, ...]
) -> None:
    loaded = load_settings(speculate, {"ATLAS_EP_PROTOCOL": protocol})
    config, _ = engine_config(loaded.settings, TINY)
    assert config.slot_compaction is moves
    if config.speculation is not None:
        assert config.speculation.full_width is not moves


def test_longer_than_the_model_allows_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--max-seq-len 99999999 exceeds the \d+ positions"):
        config_of("--max-seq-len", "99999999")


def pretend(monkeypatch: pytest.MonkeyPatch, total: int, available: int) -> None:
    def reading(reserve: int | None = None) -> DeviceMemory:
        return DeviceMemory(MemoryKind.HOST, total, available, reserve or 0)

    monkeypatch.setattr(resolve, "host_memory", reading)


@pytest.mark.parametrize(("share", "expected"), [(None, 0.5), (0.25, 0.25)])
def test_the_budget_is_a_share_of_the_memory(
    share: float | None, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, 8 * GIB, 8 * GIB)
    config, notes = finish_config(EngineConfig("m", device="cpu", dtype="auto"), share)
    assert config.memory_budget == int(8 * GIB * expected)
    assert config.dtype == "float32"
    assert notes[-1] == (
        f"memory-budget auto is {8 * expected:.2f} GiB, {expected:g} of the host memory's 8.00 GiB"
    )


@pytest.mark.parametrize(
    ("free", "share", "budget", "words"),
    [
        (139, None, 126, "126.00 GiB, 0.9 of the device memory's 140.00 GiB"),
        (139, 0.5, 70, "70.00 GiB, 0.5 of the device memory's 140.00 GiB"),
        (100, None, 100, "less than 0.9 of the device memory's 140.00 GiB (126.00 GiB)"),
    ],
)
def test_the_budget_of_a_card_never_exceeds_what_is_free(
    free: int, share: float | None, budget: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "_pick_device", lambda asked: "cuda")
    # What the context of this process takes is missing in what is free, and in our ledger.
    readings = (free * GIB - CUDA_CONTEXT, 140 * GIB)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: readings)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    properties = SimpleNamespace(is_integrated=0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: properties)
    config, notes = finish_config(EngineConfig("m", device="auto", dtype="auto"), share)
    assert (config.device, config.dtype) == ("cuda", "bfloat16")
    assert config.memory_budget == budget * GIB
    assert words in notes[-1]
    properties.is_integrated = 1
    pretend(monkeypatch, 120 * GIB, 50 * GIB)
    config, notes = finish_config(EngineConfig("m", device="auto", dtype="auto"), share, GIB)
    assert config.memory_budget == 49 * GIB
    assert "of the unified memory's 120.00 GiB" in notes[-1]


def test_what_the_host_keeps_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 8 * GIB, 4 * GIB)
    config, notes = finish_config(EngineConfig("m", device="cpu"), 0.5, GIB)
    assert config.memory_budget == 3 * GIB
    assert "4.00 GiB held by others, 1.00 GiB kept free for the host" in notes[-1]
    with pytest.raises(ConfigError, match=r"--memory-budget \d+ \(3.50 GiB\) is more than"):
        finish_config(EngineConfig("m", device="cpu", memory_budget=7 * GIB // 2), None, GIB)


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_what_does_not_fit_is_refused_before_a_process_is_started(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "_GPU_NODES", ())
    config, _ = config_of("--device", device, "--memory-budget", "1GiB")
    check_early(config)
    with pytest.raises(DoesNotFitError, match="the largest term is"):
        check_early(replace(config, memory_budget=10**6))


def test_where_there_may_be_a_gpu_only_the_files_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "_GPU_NODES", (str(tmp_path),))
    config, _ = config_of("--memory-budget", "1MB")
    check_early(config)
    with pytest.raises(ModelFormatError, match="holds no safetensors file"):
        check_early(replace(config, model_dir=str(tmp_path)))


def test_cuda_without_a_gpu_is_refused() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match="--device cuda"):
        finish_config(EngineConfig("m", device="cuda"), None)
    assert finish_config(EngineConfig("m", device="auto", memory_budget=1), None)[0].device == "cpu"
