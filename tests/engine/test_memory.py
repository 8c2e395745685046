"""What a device can give: others counted once, explicit budgets exact, unified memory too."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from engine.errors import ConfigError
from engine.reserve import memory as module
from engine.reserve.memory import (
    DeviceMemory,
    MemoryKind,
    gpu_memory,
    host_memory,
    memory_budget,
)

GIB = 2**30


def device(
    total: int, others: int = 0, reserve: int = 0, kind: MemoryKind = MemoryKind.HOST
) -> DeviceMemory:
    return DeviceMemory(kind, total, total - others, reserve)


def machine(monkeypatch: pytest.MonkeyPatch, total: int, available: int, own: int = 0) -> None:
    reading = SimpleNamespace(total=total, available=available)
    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: reading)
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=own + GIB, shared=GIB))
    monkeypatch.setattr(module.psutil, "Process", lambda: process)


@pytest.mark.parametrize("others", [0, 10 * GIB, 49 * GIB])
def test_a_share_is_one_of_all_memory_whoever_else_is_there(others: int) -> None:
    assert memory_budget(device(100 * GIB, others), 0.5).bytes == 50 * GIB


def test_what_others_hold_counts_once() -> None:
    """0.9 of 100 and 30 held by others leave 70: not 60, and not 0.9 of 70 less 30."""
    found = memory_budget(device(100 * GIB, 30 * GIB, kind=MemoryKind.DEVICE), 0.9)
    assert found.bytes == 70 * GIB
    assert "90.00 GiB" in found.why
    assert "30.00 GiB held by others" in found.why


@pytest.mark.parametrize(
    ("kind", "share"),
    [(MemoryKind.HOST, 0.5), (MemoryKind.DEVICE, 0.9), (MemoryKind.UNIFIED, 0.9)],
)
def test_shares_by_default(kind: MemoryKind, share: float) -> None:
    found = memory_budget(device(10 * GIB, kind=kind), None)
    assert found.bytes == int(10 * GIB * share)
    assert found.why == f"{share:g} of the {kind.value} memory's 10.00 GiB"


def test_an_explicit_budget_is_taken_as_it_is() -> None:
    memory = device(8 * GIB, 2 * GIB, GIB)
    assert memory_budget(memory, 0.1, 5 * GIB).bytes == 5 * GIB
    assert memory_budget(memory, None, 1).bytes == 1


def test_an_explicit_budget_that_cannot_be_had_names_both_numbers_and_the_way_out() -> None:
    memory = device(8 * GIB, 2 * GIB, GIB)
    with pytest.raises(ConfigError) as caught:
        memory_budget(memory, None, 5 * GIB + 1)
    text = str(caught.value)
    assert f"--memory-budget {5 * GIB + 1} (5.00 GiB) is more than the {5 * GIB} bytes" in text
    assert "8.00 GiB in all, 2.00 GiB held by others, 1.00 GiB kept free for the host" in text
    assert "use --memory-budget 5120MiB or less, lower --host-reserve" in text


def test_nothing_left_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no memory can be had: 8\.00 GiB in all"):
        memory_budget(device(8 * GIB, 7 * GIB, GIB), 0.5)
    with pytest.raises(ConfigError, match="kept free for the host"):
        memory_budget(device(8 * GIB, 0, 9 * GIB), 0.5)


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5, float("nan"), float("inf")])
def test_what_is_no_share(share: float) -> None:
    with pytest.raises(ConfigError, match="--gpu-memory-utilization"):
        memory_budget(device(8 * GIB), share)


def test_this_process_is_not_among_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine(monkeypatch, 64 * GIB, 40 * GIB, own=3 * GIB)
    found = host_memory(cgroup=tmp_path)
    assert (found.total, found.available) == (64 * GIB, 43 * GIB)
    assert found.others == 21 * GIB
    assert found.reserve == 2 * GIB, "a 32nd"
    assert found.limit == 41 * GIB
    assert host_memory(0, tmp_path).limit == 43 * GIB


def test_this_machine_has_memory() -> None:
    found = host_memory()
    assert 0 < found.available <= found.total <= psutil.virtual_memory().total
    assert 0 < found.limit < found.total


@pytest.mark.parametrize(
    ("names", "stat_key"),
    [
        (("memory.max", "memory.current", "memory.stat"), "inactive_file"),
        (
            (
                "memory/memory.limit_in_bytes",
                "memory/memory.usage_in_bytes",
                "memory/memory.stat",
            ),
            "total_inactive_file",
        ),
    ],
)
def test_a_control_group_bounds_what_there_is_and_what_is_left(
    names: tuple[str, str, str], stat_key: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine(monkeypatch, 64 * GIB, 40 * GIB)
    limit, used, stat = (tmp_path / name for name in names)
    limit.parent.mkdir(exist_ok=True)
    used.write_text(f"{6 * GIB}\n")
    stat.write_text(f"anon 5\n{stat_key} {2 * GIB}\nodd line here\n")
    for text, expected in (
        (f"{16 * GIB}\n", (16 * GIB, 12 * GIB)),
        (f"{128 * GIB}\n", (64 * GIB, 40 * GIB)),
        ("max\n", (64 * GIB, 40 * GIB)),
    ):
        limit.write_text(text)
        found = host_memory(cgroup=tmp_path)
        assert (found.total, found.available) == expected
    limit.write_text(f"{16 * GIB}\n")
    stat.unlink()
    assert host_memory(cgroup=tmp_path).available == 10 * GIB


def test_a_card_has_its_own_memory_and_our_context_is_ours() -> None:
    host = device(64 * GIB, 60 * GIB, 2 * GIB)
    found = gpu_memory(70 * GIB, 80 * GIB, host, integrated=False, own_context=GIB)
    assert found == DeviceMemory(MemoryKind.DEVICE, 80 * GIB, 71 * GIB, 0)
    full = gpu_memory(80 * GIB, 80 * GIB, host, integrated=False, own_context=GIB)
    assert full.others == 0


@pytest.mark.parametrize("free", [0, 5 * GIB, 200 * GIB])
def test_unified_memory_is_read_from_the_host(free: int) -> None:
    """cudaMemGetInfo counts cached pages as taken there; they are not."""
    host = device(120 * GIB, 20 * GIB, 4 * GIB)
    found = gpu_memory(free, 121 * GIB, host, integrated=True, own_context=GIB)
    assert found == DeviceMemory(MemoryKind.UNIFIED, 120 * GIB, 100 * GIB, 4 * GIB)
    assert found.limit == 96 * GIB
    assert memory_budget(found, 0.9).bytes == 96 * GIB
    assert memory_budget(found, 0.5).bytes == 60 * GIB


def test_memory_that_frees_itself_meanwhile_makes_no_term_negative(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """More available than there is, as after another process ended between two readings."""
    machine(monkeypatch, 64 * GIB, 70 * GIB, own=GIB)
    found = host_memory(cgroup=tmp_path)
    assert (found.available, found.others) == (64 * GIB, 0)
    (tmp_path / "memory.max").write_text(str(GIB))
    (tmp_path / "memory.current").write_text(str(3 * GIB))
    found = host_memory(0, tmp_path)
    assert (found.limit, found.others) == (0, GIB)


@pytest.mark.parametrize(
    ("line", "below", "name"),
    [
        ("0::/a.slice/b.service", "a.slice/b.service", "memory.max"),
        ("7:memory:/docker/1", "memory/docker/1", "memory.limit_in_bytes"),
        ("3:cpu,memory:/x", "memory/x", "memory.limit_in_bytes"),
    ],
)
def test_the_group_of_this_process_and_those_above_it_count(
    line: str, below: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine(monkeypatch, 64 * GIB, 40 * GIB)
    own = tmp_path / "own"
    own.write_text(f"12:pids:/elsewhere\n{line}\n")
    group = tmp_path / below
    group.mkdir(parents=True)
    (group / name).write_text(f"{8 * GIB}\n")
    current = "memory.current" if name == "memory.max" else "memory.usage_in_bytes"
    (group / current).write_text(f"{3 * GIB}\n")
    found = host_memory(0, tmp_path, own)
    assert (found.total, found.available) == (8 * GIB, 5 * GIB)
    (group.parent / name).write_text(f"{6 * GIB}\n")
    (group.parent / current).write_text(f"{5 * GIB}\n")
    found = host_memory(0, tmp_path, own)
    assert (found.total, found.available) == (6 * GIB, GIB)


@pytest.mark.parametrize("text", ["0::/../other", "0::/gone", "nonsense", "", "\xff"])
def test_a_group_that_cannot_be_read_limits_nothing(
    text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine(monkeypatch, 64 * GIB, 40 * GIB)
    (tmp_path / "own").write_text(text, encoding="latin-1")
    assert host_memory(0, tmp_path, tmp_path / "own").total == 64 * GIB
