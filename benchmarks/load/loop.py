"""Closed loops: some clients, each with one request at a time, until the jobs are gone.

Sums samples up into the numbers that are reported; knows nothing of tables or flags.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.load.measure import Job, Sample, ask, percentile
from benchmarks.load.processes import read_cpu
from benchmarks.load.wire import Connection, Target, WireError

Percentiles = dict[str, float | None]
# Different sentences in a report; `failed` counts all.
SHOWN_ERRORS = 5


@dataclass(frozen=True, slots=True)
class Run:
    """One closed loop. Times in milliseconds, `cpu` in cores used on average."""

    seconds: float
    requests: int
    prompt_tokens: int
    completion_tokens: int
    tok_s: float
    ttft_ms: Percentiles
    gap_ms: Percentiles
    token_ms: Percentiles
    request_ms: Percentiles
    cpu: dict[str, float | None]
    errors: dict[str, int]


async def run_loop(
    target: Target, jobs: Sequence[Job], concurrency: int, server_pid: int | None, timeout: float
) -> Run:
    """Answer all jobs with `concurrency` clients; a request longer than `timeout` s is an error."""
    waiting = deque(jobs)
    samples: list[Sample] = []

    async def client() -> None:
        connection: Connection | None = None
        while waiting:
            job = waiting.popleft()
            try:
                if connection is None or not connection.usable:
                    connection = await Connection.open(target)
                async with asyncio.timeout(timeout):
                    samples.append(await ask(connection, target, job))
            except TimeoutError:
                samples.append(Sample(timeout, error=f"no complete answer within {timeout:g} s"))
            except (OSError, WireError) as error:
                samples.append(Sample(0.0, error=f"no connection: {error}"))
        if connection is not None:
            connection.close()

    before, started = read_cpu(server_pid), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(jobs))):
            group.create_task(client())
    seconds = time.perf_counter() - started
    return summarise(samples, seconds, before.shares(read_cpu(server_pid)))


def summarise(samples: Sequence[Sample], seconds: float, cpu: dict[str, float | None]) -> Run:
    """Throughput over all tokens that came; latencies over the requests without an error."""
    good = [sample for sample in samples if sample.error is None]
    tokens = sum(sample.completion_tokens for sample in samples)
    return Run(
        seconds=round(seconds, 3),
        requests=len(samples),
        prompt_tokens=sum(sample.prompt_tokens for sample in samples),
        completion_tokens=tokens,
        tok_s=round(tokens / seconds, 1),
        ttft_ms=_percentiles([s.ttft for s in good if s.ttft is not None]),
        gap_ms=_percentiles([gap for s in good for gap in s.gaps]),
        token_ms=_percentiles(
            [
                (s.seconds - s.ttft) / (s.completion_tokens - 1)
                for s in good
                if s.ttft is not None and s.completion_tokens > 1
            ]
        ),
        request_ms=_percentiles([s.seconds for s in good]),
        cpu=cpu,
        errors=dict(Counter(s.error for s in samples if s.error is not None)),
    )


def _percentiles(seconds: Sequence[float]) -> Percentiles:
    def at(share: float) -> float | None:
        value = percentile(seconds, share)
        return None if value is None else round(value * 1e3, 2)

    return {"p50": at(0.5), "p99": at(0.99)}


def median_of(runs: Sequence[Run], concurrency: int) -> dict[str, object]:
    """One row of the report: every number is the median over the runs, errors are summed."""
    errors: Counter[str] = Counter()
    for run in runs:
        errors.update(run.errors)

    def middle(pick: Callable[[Run], dict[str, float | None]]) -> dict[str, float | None]:
        keys = pick(runs[0])
        columns = {
            key: [value for run in runs if (value := pick(run)[key]) is not None] for key in keys
        }
        return {key: round(statistics.median(c), 3) if c else None for key, c in columns.items()}

    requests = sum(run.requests for run in runs)
    return {
        "concurrency": concurrency,
        "tok_s": statistics.median(run.tok_s for run in runs),
        "tok_s_runs": [run.tok_s for run in runs],
        "ttft_ms": middle(lambda run: run.ttft_ms),
        "gap_ms": middle(lambda run: run.gap_ms),
        "token_ms": middle(lambda run: run.token_ms),
        "request_ms": middle(lambda run: run.request_ms),
        "cpu_cores": middle(lambda run: run.cpu),
        "requests": requests,
        "failed": sum(errors.values()),
        "errors": dict(errors.most_common(SHOWN_ERRORS)),
        "prompt_tokens_mean": round(sum(run.prompt_tokens for run in runs) / requests, 1),
        "completion_tokens_mean": round(sum(run.completion_tokens for run in runs) / requests, 1),
    }
