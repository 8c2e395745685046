"""What a device has, what others hold of it, and the budget that this leaves. Knows no ledger term.

What others hold counts once, as memory that is not available; the share of a device is one of all
that it has, whoever else is there. This process is nobody else: what it holds is in its own ledger.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

from engine.errors import ConfigError
from engine.reserve.sizes import format_bytes

CPU_UTILISATION = 0.5
GPU_UTILISATION = 0.9
# Kept free where the host's own programs live in the same memory: a 32nd, unless told otherwise.
HOST_RESERVE_PART = 32
_CGROUP = Path("/sys/fs/cgroup")
_OWN_GROUP = Path("/proc/self/cgroup")
_MIB = 2**20


class MemoryKind(StrEnum):
    """Whose memory it is.

    HOST: the machine's, for a CPU. DEVICE: a card's own. UNIFIED: one memory that host and GPU
    share, such as a GB10's.
    """

    HOST = "host"
    DEVICE = "device"
    UNIFIED = "unified"


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """One reading, in bytes.

    Attributes:
        total: what there is, or what a control group allows of it.
        available: what this process could hold now; others hold the rest.
        reserve: of that, what stays free for the host; 0 on a card of its own.
    """

    kind: MemoryKind
    total: int
    available: int
    reserve: int = 0

    @property
    def others(self) -> int:
        """Bytes that others hold."""
        return max(self.total - self.available, 0)

    @property
    def limit(self) -> int:
        """The largest budget that can be had."""
        return max(min(self.available, self.total) - self.reserve, 0)


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes that the engine may take, and one sentence on where they come from."""

    bytes: int
    why: str


def memory_budget(memory: DeviceMemory, share: float | None, asked: int | None = None) -> Budget:
    """An explicit size as it is, or a share of all memory, less if others hold too much of it.

    Args:
        memory: the device's.
        share: of its total, None for 0.5 of a host's, which others use too, and 0.9 of a GPU's.
        asked: an explicit budget; wins over the share.

    Raises:
        ConfigError: the explicit budget is more than can be had, nothing can be had, or the share
            is not above 0 and at most 1.
    """
    if asked is not None:
        if asked > memory.limit:
            raise ConfigError(
                f"--memory-budget {asked} ({format_bytes(asked)}) is more than the {memory.limit} "
                f"bytes ({format_bytes(memory.limit)}) that can be had: {_account(memory)}; "
                f"{_less(memory)}"
            )
        return Budget(asked, "as asked")
    if share is None:
        share = CPU_UTILISATION if memory.kind is MemoryKind.HOST else GPU_UTILISATION
    if not 0 < share <= 1:
        raise ConfigError(
            f"--gpu-memory-utilization {share:g} is not a share; use more than 0 and at most 1"
        )
    wanted = int(memory.total * share)
    if memory.limit == 0:
        raise ConfigError(f"no memory can be had: {_account(memory)}; {_less(memory)}")
    part = f"{share:g} of the {memory.kind.value} memory's {format_bytes(memory.total)}"
    if wanted <= memory.limit:
        return Budget(wanted, part)
    return Budget(
        memory.limit, f"less than {part} ({format_bytes(wanted)}), because of {_account(memory)}"
    )


def _account(memory: DeviceMemory) -> str:
    text = f"{format_bytes(memory.total)} in all, {format_bytes(memory.others)} held by others"
    if memory.reserve:
        text += f", {format_bytes(memory.reserve)} kept free for the host (--host-reserve)"
    return text


def _less(memory: DeviceMemory) -> str:
    ways = (
        [f"use --memory-budget {memory.limit // _MIB}MiB or less"] if memory.limit >= _MIB else []
    )
    ways += ["lower --host-reserve"] if memory.reserve else []
    return ", ".join([*ways, "or end what else holds memory"])


def host_memory(
    reserve: int | None = None, cgroup: Path = _CGROUP, own_group: Path = _OWN_GROUP
) -> DeviceMemory:
    """The machine's memory, or what the process's control groups allow, by the smallest number.

    Pages of files that are cached count as available: the system gives them back when asked.

    Args:
        reserve: bytes kept free for the host, None for a 32nd of the total.
        cgroup: where control groups are mounted, of either version.
        own_group: the file that says which of them this process is in.
    """
    machine = psutil.virtual_memory()
    total, available = int(machine.total), int(machine.available)
    for files in _control_groups(cgroup, own_group):
        limit = _number(files.limit)
        if limit is not None and limit < machine.total:
            total, available = min(total, limit), min(available, limit - files.used())
    available = min(available + _own_bytes(), total)
    return DeviceMemory(
        MemoryKind.HOST,
        total,
        max(available, 0),
        total // HOST_RESERVE_PART if reserve is None else reserve,
    )


def gpu_memory(
    free: int,
    total: int,
    host: DeviceMemory,
    *,
    integrated: bool,
    own_context: int = 0,
) -> DeviceMemory:
    """A GPU's memory from what cudaMemGetInfo says.

    An integrated GPU has no memory of its own: cudaMemGetInfo gives the host's whole memory as
    its total, and as free only what no cached page fills. There the host's reading counts.

    Args:
        free, total: of cudaMemGetInfo, read with a context of this process.
        host: the machine's memory, with what stays free of it.
        integrated: the GPU shares the host's memory.
        own_context: bytes that the context takes: they are missing in `free` and in the ledger.
    """
    if integrated:
        smaller = min(total, host.total)
        return DeviceMemory(MemoryKind.UNIFIED, smaller, min(host.available, smaller), host.reserve)
    return DeviceMemory(MemoryKind.DEVICE, total, min(free + own_context, total))


def _own_bytes() -> int:
    """What this process holds besides pages of files, which count as available anyway."""
    info = psutil.Process().memory_info()
    return max(int(info.rss) - int(getattr(info, "shared", 0)), 0)


@dataclass(frozen=True, slots=True)
class _Group:
    """Files of one control group; `cached` is the key of what can be given back."""

    limit: Path
    current: Path
    stat: Path
    cached: str

    def used(self) -> int:
        """Bytes charged to it, without cached pages of files that nobody has used of late."""
        used = _number(self.current) or 0
        return max(used - _stat(self.stat, self.cached), 0)


def _control_groups(root: Path, own_group: Path) -> Iterator[_Group]:
    """The groups that this process is in, of both versions, each with all those above it."""
    try:
        lines = own_group.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        lines = []
    own = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    unified = next((path for number, kinds, path in own if number == "0" and not kinds), "/")
    memory = next((path for _, kinds, path in own if "memory" in kinds.split(",")), "/")
    for place in _upwards(root, unified):
        yield _Group(
            place / "memory.max", place / "memory.current", place / "memory.stat", "inactive_file"
        )
    for place in _upwards(root / "memory", memory):
        yield _Group(
            place / "memory.limit_in_bytes",
            place / "memory.usage_in_bytes",
            place / "memory.stat",
            "total_inactive_file",
        )


def _upwards(root: Path, path: str) -> Iterator[Path]:
    """`root` and the folders below it on the way to `path`."""
    yield root
    for part in path.strip("/").split("/"):
        # A group outside of this namespace shows as /..; it cannot be read from here.
        if part in ("", ".."):
            return
        root = root / part
        yield root


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _stat(path: Path, key: str) -> int:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    values = dict(line.split() for line in lines if len(line.split()) == 2)
    return int(values.get(key, "0"))
