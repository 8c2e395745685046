"""What `auto` becomes, and that every setting of the engine reaches its configuration."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.reserve.ssm_reserve import SsmRollbackMode
from engine.speculation.policy import PolicySettings
from spark_server import resolve
from spark_server.model_source import locate_model
from spark_server.resolve import cpu_memory, engine_config, finish_config
from spark_server.settings import load_settings

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
    )
    assert notes == []
    assert finish_config(config, None) == (config, [])


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


@pytest.mark.parametrize(("share", "expected"), [(None, 0.5), (0.25, 0.25)])
def test_the_budget_is_a_share_of_the_memory(
    share: float | None, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "cpu_memory", lambda: 8 * 2**30)
    config, notes = finish_config(EngineConfig("m", device="cpu", dtype="auto"), share)
    assert config.memory_budget == int(8 * 2**30 * expected)
    assert config.dtype == "float32"
    assert notes[-1] == (
        f"memory-budget auto is {8 * expected:.2f} GiB, {expected:g} of the cpu's 8.00 GiB"
    )


@pytest.mark.parametrize(
    ("free", "share", "budget", "words"),
    [
        (139, None, 126, "126.00 GiB, 0.9 of the cuda's 140.00 GiB"),
        (139, 0.5, 70, "70.00 GiB, 0.5 of the cuda's 140.00 GiB"),
        (100, None, 100, "100.00 GiB, all that is free; 0.9 of the cuda's 140.00 GiB would be 126"),
    ],
)
def test_the_budget_of_a_card_never_exceeds_what_is_free(
    free: int, share: float | None, budget: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "_pick_device", lambda asked: "cuda")
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (free * 2**30, 140 * 2**30))
    config, notes = finish_config(EngineConfig("m", device="auto", dtype="auto"), share)
    assert (config.device, config.dtype) == ("cuda", "bfloat16")
    assert config.memory_budget == budget * 2**30
    assert words in notes[-1]


def test_a_control_group_bounds_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    total = psutil.virtual_memory().total
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(resolve, "_CGROUP_LIMITS", (str(tmp_path / "none"), str(limit)))
    for text, expected in (("max\n", total), ("1048576\n", 2**20), (f"{total * 2}\n", total)):
        limit.write_text(text)
        assert cpu_memory() == expected


def test_cuda_without_a_gpu_is_refused() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match="--device cuda"):
        finish_config(EngineConfig("m", device="cuda"), None)
    assert finish_config(EngineConfig("m", device="auto", memory_budget=1), None)[0].device == "cpu"
