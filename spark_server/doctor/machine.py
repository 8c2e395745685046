"""Checks of the interpreter, its packages, the processor, memory, caches and the port.

Imports torch and numba where a check needs them.
"""

from __future__ import annotations

import contextlib
import importlib.metadata as metadata
import importlib.util
import os
import platform
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from engine.errors import ConfigError
from engine.reserve.memory import (
    CPU_UTILISATION,
    GPU_UTILISATION,
    DeviceMemory,
    MemoryKind,
    host_memory,
    memory_budget,
)
from engine.reserve.sizes import format_bytes
from spark_server.doctor.check import INSTALL, Check, fail, ok, warn

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)
OLDEST_TRITON = (3, 6)
# Less than this and not even spark-tiny starts: 350 MiB of process, 320 of grammar, 64 of headroom.
LEAST_MEMORY = 2**30
DISTRIBUTION = "spark-server"


def python() -> Iterator[Check]:
    """The interpreter's version and width."""
    found = f"{platform.python_version()}, {8 * struct.calcsize('P')} bit, {sys.executable}"
    if sys.version_info[:2] < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        yield fail("python", found, f"use Python {oldest} or newer")
    else:
        yield ok("python", found)


def packages() -> Iterator[Check]:
    """Every package that the distribution requires is there."""
    try:
        wanted = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        yield warn(
            "packages", f"{DISTRIBUTION} is not installed", "pip install -c constraints.txt ."
        )
        return
    names = [re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in wanted if "extra ==" not in text]
    missing = [name for name in names if _version(name) is None]
    if missing:
        yield fail(
            "packages",
            f"{', '.join(missing)} missing of {len(names)}",
            INSTALL,
        )
    else:
        yield ok("packages", f"all {len(names)} that Spark requires")


def hub_kernels() -> Iterator[Check]:
    """Hugging Face's `kernels` brings a module of the same name as ours."""
    spec = importlib.util.find_spec("kernels")
    engine = importlib.util.find_spec("engine")
    ours = (
        spec is not None
        and engine is not None
        and Path(spec.origin or "").parents[1] == Path(engine.origin or "").parents[1]
    )
    other = _version("kernels")
    if other is not None or not ours:
        yield fail(
            "kernels",
            f"Hugging Face's kernels {other or ''} shares the environment".replace("  ", " "),
            "pip uninstall kernels, then install Spark again: both bring a module of that name",
        )
    else:
        yield ok("kernels", "the module is Spark's own")


def torch_build() -> Iterator[Check]:
    """torch's version and build."""
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    yield _at_least("torch", torch.__version__, OLDEST_TORCH, build)


def triton_build(device: str) -> Iterator[Check]:
    """triton's version; only a GPU needs it."""
    version = _version("triton")
    if version is not None:
        use = "compiles the kernels" if device == "cuda" else "not used on a CPU"
        yield _at_least("triton", version, OLDEST_TRITON, use)
    elif device == "cuda":
        yield fail("triton", "not installed", "pip install -c constraints.txt '.[gpu]'")
    else:
        yield ok("triton", "not installed, and not needed on a CPU")


def processor() -> Iterator[Check]:
    """Architecture and instruction set, as torch uses them."""
    import torch

    isa = torch.backends.cpu.get_cpu_capability()
    found = f"{platform.machine()}, {isa}{_tiles()}"
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        yield warn(
            "processor",
            f"{found}, no fp16 products",
            "use --kernels naive, which is slower and takes twice the memory",
        )
    elif isa in ("DEFAULT", "NO AVX"):
        yield warn("processor", f"{found}: no vectors", "use a processor with AVX2 or newer")
    else:
        yield ok("processor", found)


def _tiles() -> str:
    """Whether matrix registers are used; without numba nothing here would use them."""
    if importlib.util.find_spec("numba") is None:
        return ""
    from kernels.tile_registers import usable

    return ", AMX" if usable() else ""


def memory(reserve: int | None = None) -> Iterator[Check]:
    """What the engine could have of the machine's memory now."""
    found = host_memory(reserve)
    yield memory_line("memory", found)


def memory_line(name: str, found: DeviceMemory) -> Check:
    """One line on a reading of memory, of a host or of a GPU."""
    text = (
        f"{format_bytes(found.total)} in all, {format_bytes(found.others)} held by others, "
        f"{format_bytes(found.limit)} to be had"
    )
    if found.limit < LEAST_MEMORY:
        return fail(
            name,
            f"{text}, less than {format_bytes(LEAST_MEMORY)}",
            "end what else holds memory, or lower --host-reserve",
        )
    try:
        budget = memory_budget(found, None)
    except ConfigError as error:
        return fail(name, text, str(error))
    share = CPU_UTILISATION if found.kind is MemoryKind.HOST else GPU_UTILISATION
    if budget.bytes < int(found.total * share):
        way = "end what else holds memory, or set --memory-budget"
        return warn(name, f"{text}, budget {format_bytes(budget.bytes)}", way)
    return ok(name, f"{text}, budget {format_bytes(budget.bytes)}")


def numba_cache() -> Iterator[Check]:
    """Where compiled kernels are kept between starts."""
    import kernels

    own = Path(kernels.__file__ or "").parent / "silu_mul" / "__pycache__"
    asked = os.environ.get("NUMBA_CACHE_DIR")
    user = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "numba"
    places = [Path(asked)] if asked else [own, user]
    for place in places:
        if _writable(place):
            there = "compiled kernels there" if _has_compiled(place) else "empty yet"
            yield ok("kernel cache", f"{place}, {there}")
            return
    yield fail(
        "kernel cache",
        f"cannot write to {' or '.join(map(str, places))}",
        "set NUMBA_CACHE_DIR to a folder that can be written to; every start would compile anew",
    )


def threads() -> Iterator[Check]:
    """CPUs, and the layer that numba's kernels run on; ask after the kernels have run."""
    import numba
    import torch

    usable, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    with contextlib.suppress(ValueError):
        layer = numba.threading_layer()
        if layer != "omp":
            yield warn(
                "threads",
                f"numba runs on {layer} beside torch's threads",
                "install libgomp1, or steps take up to twice as long",
            )
            return
    busy = os.getloadavg()[0]
    found = f"{usable} of {there} CPUs, torch {torch.get_num_threads()}, load {busy:.1f}"
    if busy > usable:
        yield warn("threads", found, "others keep the CPUs busy; expect slower steps")
    else:
        yield ok("threads", found)


def port(host: str, number: int) -> Iterator[Check]:
    """Nobody else listens where the server would."""
    from spark_server.server import bind

    with contextlib.closing(bind(host, number)):
        free = f"{number} on {host} is free"
        yield ok("port", free if number else f"0 takes a free one on {host}")


def _at_least(name: str, version: str, oldest: tuple[int, int], detail: str) -> Check:
    parts = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if parts < oldest:
        wanted = ".".join(map(str, oldest))
        way = f"pip install -c constraints.txt '{name}>={wanted}'"
        return fail(name, f"{version}, older than {wanted}", way)
    return ok(name, f"{version}, {detail}")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _writable(place: Path) -> bool:
    """Whether a file could be made there, or in the nearest folder that exists."""
    while not place.exists() and place != place.parent:
        place = place.parent
    return os.access(place, os.W_OK | os.X_OK)


def _has_compiled(place: Path) -> bool:
    return place.is_dir() and next(place.rglob("*.nbi"), None) is not None
