"""What both processes take of the machine, read when somebody scrapes. Knows no request."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

PROCESS_NAMES = (
    "spark_process_cpu_seconds_total",
    "spark_process_resident_bytes",
    "spark_engine_peak_bytes",
)


class ProcessCollector(Collector):
    """CPU time and resident memory of both processes; the engine's come with its heartbeat."""

    def __init__(self) -> None:
        self._resident = 0
        self._peak = 0
        self._engine_cpu = 0.0
        self._earlier_cpu = 0.0

    def beat(self, cpu_seconds: float, resident: int, peak: int) -> None:
        """What the engine process says of itself; its CPU time begins anew with every process."""
        if cpu_seconds < self._engine_cpu:
            self._earlier_cpu += self._engine_cpu
        self._engine_cpu = cpu_seconds
        self._resident = resident
        self._peak = peak

    def engine_lost(self) -> None:
        """There is no engine process; its memory is given back."""
        self._resident = self._peak = 0

    def collect(self) -> Iterator[Metric]:
        cpu = CounterMetricFamily(
            "spark_process_cpu_seconds", "CPU time, user and system", labels=["process"]
        )
        cpu.add_metric(["api"], time.process_time())
        cpu.add_metric(["engine"], self._earlier_cpu + self._engine_cpu)
        yield cpu
        resident = GaugeMetricFamily(
            "spark_process_resident_bytes", "Resident memory", labels=["process"]
        )
        resident.add_metric(["api"], resident_bytes())
        resident.add_metric(["engine"], self._resident)
        yield resident
        yield GaugeMetricFamily(
            "spark_engine_peak_bytes",
            "Most that the engine held: resident bytes, on a card bytes of tensors",
            value=self._peak,
        )


def resident_bytes() -> int:
    """Resident memory of this process in bytes."""
    import psutil

    return int(psutil.Process().memory_info().rss)
