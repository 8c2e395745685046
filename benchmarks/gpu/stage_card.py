"""Stage `card`: versions, and what the memory and the arithmetic of this machine reach."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import replace

import torch

from benchmarks.gpu.options import Machine, Options
from benchmarks.gpu.rows import Row, Status
from benchmarks.gpu.runner import Emit
from benchmarks.gpu.timing import median_seconds

STAGE = "card"
COPY = "copy"
PRODUCT = "bf16 product"


def run(options: Options, emit: Emit) -> None:
    """Emit the card, the versions, the bandwidth and the rate."""
    device = torch.device(options.device)
    emit(_versions(device))
    emit(_copy(device, (1 << 20) if options.smoke else (1 << 30)))
    emit(_product(device, 128 if options.smoke else 8192))


def learn(options: Options, rows: Sequence[Row]) -> Options:
    """The options with the limits that were measured, once both are."""
    speeds = {row.name: row.numbers.get("per_second") for row in rows if row.stage == STAGE}
    bandwidth, rate = speeds.get(COPY), speeds.get(PRODUCT)
    if not isinstance(bandwidth, float) or not isinstance(rate, float):
        return options
    return replace(options, machine=Machine(bandwidth, rate))


def _versions(device: torch.device) -> Row:
    import triton

    numbers: dict[str, int | float | str | bool | None] = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": str(triton.__version__),
        "cuda": torch.version.cuda,
        "machine": platform.machine(),
    }
    name = "CPU"
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        name = found.name
        numbers |= {
            "card": found.name,
            "memory_bytes": found.total_memory,
            "processors": found.multi_processor_count,
            "capability": f"{found.major}.{found.minor}",
        }
    text = f"{name}, torch {numbers['torch']}, triton {numbers['triton']}"
    return Row(STAGE, "machine", Status.INFO, f"{text}, Python {numbers['python']}", numbers)


def _copy(device: torch.device, count: int) -> Row:
    """`count` bytes are read and written."""
    source = torch.zeros(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = median_seconds(lambda: target.copy_(source), device)
    speed = 2 * count / seconds
    numbers = {"per_second": speed, "bytes": 2 * count, "seconds": seconds}
    return Row(STAGE, COPY, Status.INFO, f"{speed / 1e9:,.0f} GB/s read and written", numbers)


def _product(device: torch.device, side: int) -> Row:
    left = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    right = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    seconds = median_seconds(lambda: left @ right, device)
    rate = 2 * side**3 / seconds
    numbers = {"per_second": rate, "side": side, "seconds": seconds}
    return Row(STAGE, PRODUCT, Status.INFO, f"{rate / 1e12:,.2f} TFLOP/s at {side}", numbers)
