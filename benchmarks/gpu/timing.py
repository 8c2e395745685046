"""Times one call on the device at hand. Knows no roofline."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

# Enough for a median of kernels of 5 us to 5 ms, with the cache cleared before each.
WARMUP_MS = 10
MEASURE_MS = 40


def median_seconds(
    step: Callable[[], object], device: torch.device, *, smoke: bool = False
) -> float:
    """Median of many calls on a card, cold caches, by triton.testing.do_bench; of three on a CPU.

    The first call, which compiles, is not counted; in a smoke run it is the only one.
    """
    start = time.perf_counter()
    step()
    if smoke:
        return time.perf_counter() - start
    if device.type == "cuda":
        from triton.testing import do_bench

        milliseconds: float = do_bench(step, warmup=WARMUP_MS, rep=MEASURE_MS, return_mode="median")
        return milliseconds / 1e3
    times = []
    for _ in range(3):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
