"""What `auto` becomes, and that every setting of the engine reaches its configuration."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
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
    )
    assert notes == []
    assert finish_config(config, None) == (config, [])


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
