"""`spark bench` against a fake server: what it sends, counts, calls a failure and prints."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable

import pytest

from benchmarks.load.cli import main, parse_args
from benchmarks.load.compare import paired_ratio
from benchmarks.load.loop import Run, median_of, summarise
from benchmarks.load.measure import Sample, percentile
from benchmarks.load.processes import CpuTimes, read_cpu
from benchmarks.load.report import table
from benchmarks.load.wire import Target
from tests.benchmarks.fake_server import FakeServer, fake_server

Bench = Callable[..., tuple[int, dict[str, object], FakeServer]]


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Bench:
    """Run `spark bench` on a fake server; gives exit code, JSON summary and the fake."""

    def run(*flags: str, **settings: object) -> tuple[int, dict[str, object], FakeServer]:
        async def both() -> tuple[int, FakeServer]:
            async with fake_server(**settings) as fake:
                code = await asyncio.to_thread(main, ["--url", fake.url, *flags])
                return code, fake

        code, fake = asyncio.run(both())
        out = capsys.readouterr().out.strip().splitlines()
        return code, json.loads(out[-1]), fake

    return run


def levels(summary: dict[str, object]) -> list[dict[str, object]]:
    rows = summary["levels"]
    assert isinstance(rows, list)
    return rows


QUICK = ("--runs", "2", "--output-tokens", "24", "--prompt-tokens", "9", "--ignore-eos")


def test_closed_loop_keeps_the_asked_number_of_requests_running(bench: Bench) -> None:
    code, summary, fake = bench("--concurrency", "1,5", "--requests", "10", *QUICK)
    assert code == 0
    assert fake.most_running == 5
    assert [row["concurrency"] for row in levels(summary)] == [1, 5]
    one, five = levels(summary)
    assert one["requests"] == five["requests"] == 20
    assert one["failed"] == 0
    assert one["completion_tokens_mean"] == 24
    assert one["prompt_tokens_mean"] == 7, "from usage, not from what was asked for"
    assert isinstance(one["tok_s"], float)
    assert isinstance(five["tok_s"], float)
    assert five["tok_s"] > 2 * one["tok_s"]
    ttft = one["ttft_ms"]
    assert isinstance(ttft, dict)
    assert 1 < ttft["p50"] <= ttft["p99"] < 500


def test_prompts_are_distinct_token_ids_of_the_asked_length(bench: Bench) -> None:
    _, _, fake = bench("--concurrency", "4", *QUICK)
    prompts = [tuple(body["prompt"]) for body in fake.bodies]  # type: ignore[arg-type]
    assert len(set(prompts)) == len(prompts) == 4 + 2 * 16
    assert {len(prompt) for prompt in prompts} == {9}
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in fake.bodies)
    assert all(body["stream_options"] == {"include_usage": True} for body in fake.bodies)


def test_words_serve_where_the_target_cannot_tokenize(bench: Bench) -> None:
    code, _, fake = bench("--concurrency", "1", *QUICK, tokenize=False)
    assert code == 0
    assert all(len(str(body["prompt"]).split()) == 9 for body in fake.bodies)


@pytest.mark.parametrize("kind", ["prose", "tool"])
def test_chats_of_the_small_world(bench: Bench, kind: str) -> None:
    code, summary, fake = bench("--concurrency", "2", "--prompts", kind, "--runs", "1")
    assert code == 0
    assert summary["prompts"] == kind
    assert all(body["messages"] for body in fake.bodies)
    assert all(("tools" in body) == (kind == "tool") for body in fake.bodies)
    assert "ignore_eos" not in fake.bodies[0]


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("refuse", "HTTP 429: the queue is full"),
        ("error", "the engine died"),
        ("drop", "the server closed the connection mid-answer (no reason)"),
        ("short", "1 tokens came where 24 were asked for with --ignore-eos"),
        ("slow", "no complete answer within 0.2 s"),
    ],
)
def test_every_fault_is_counted_and_ends_with_exit_code_1(
    bench: Bench, fault: str, text: str
) -> None:
    flags = ("--concurrency", "2", "--requests", "4", "--timeout", "0.2", "--runs", "1")
    code, summary, _ = bench(*flags, "--output-tokens", "24", "--ignore-eos", fault=fault)
    assert code == 1
    assert levels(summary)[0]["errors"] == {text: 4}


def test_the_api_key_is_sent(bench: Bench) -> None:
    _, _, fake = bench("--concurrency", "1", "--api-key", "sk-1", *QUICK)
    assert set(fake.keys) == {"Bearer sk-1"}


def test_nothing_to_measure_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", "http://127.0.0.1:9"]) == 2
    assert main(["--url", "localhost:8000"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "is not a URL of the form" in err


@pytest.mark.parametrize(
    "flags", [["--spawn", "--url", "http://x"], ["--", "--max-batch-size", "2"], ["--runs", "0"]]
)
def test_contradictory_flags_are_refused(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_args(flags)
    assert stop.value.code == 2
    capsys.readouterr()


def test_flags_after_two_dashes_go_to_the_server() -> None:
    args = parse_args(["--spawn", "--runs", "1", "--", "--max-batch-size", "2"])
    assert args.serve_flags == ["--max-batch-size", "2"]


def test_the_table_fits_a_terminal_and_names_the_errors() -> None:
    sample = Sample(1.0, ttft=1.2345, gaps=(0.1234,), completion_tokens=1000, error=None)
    run = summarise([sample], 0.04, {"client": 0.25, "api": 0.5, "engine": None})
    broken = summarise([Sample(1.0, error="broke")], 1.0, {"client": 0.0})
    lines = table([median_of([run], 128), median_of([broken], 1)], "title").splitlines()
    assert max(map(len, lines[:5])) <= 80
    assert lines[3].split()[:4] == ["128", "25000", "1234.5", "1234.5"]
    assert lines[3].split()[-3:] == ["0.25", "0.50", "-"]
    assert lines[-1] == "1 clients: 1 x broke"


def test_percentiles_are_values_that_occurred() -> None:
    assert percentile([], 0.5) is None
    assert percentile([3.0], 0.99) == 3.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.0
    assert percentile(list(map(float, range(1, 101))), 0.99) == 99.0


def test_failed_requests_stay_out_of_the_latencies_but_not_out_of_the_tokens() -> None:
    good = Sample(1.0, ttft=0.1, gaps=(0.2, 0.4), prompt_tokens=3, completion_tokens=10)
    bad = Sample(9.0, ttft=8.0, completion_tokens=5, error="broke")
    run = summarise([good, bad], 3.0, {"client": 0.5})
    assert run.tok_s == 5.0
    assert run.ttft_ms == {"p50": 100.0, "p99": 100.0}
    assert run.token_ms["p50"] == 100.0
    row = median_of([run, run, summarise([good], 1.0, {"client": None})], 2)
    assert row["tok_s"] == 5.0
    assert row["failed"] == 2
    assert row["cpu_cores"] == {"client": 0.5}


def test_processor_time_is_split_by_role() -> None:
    before, after = CpuTimes(0.0, 1.0, 2.0, 3.0), CpuTimes(2.0, 2.0, 3.0, 7.0)
    assert before.shares(after) == {"client": 0.5, "api": 0.5, "engine": 2.0}
    assert CpuTimes(0.0, 0.0).shares(CpuTimes(1.0, 0.25)) == {
        "client": 0.25,
        "api": None,
        "engine": None,
    }
    here = read_cpu(os.getpid())
    assert here.api is not None
    assert here.api > 0


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://127.0.0.1:8000", Target("127.0.0.1", 8000)),
        ("http://host/v1/", Target("host", 80)),
        ("https://host/deep/v1", Target("host", 443, True, "/deep")),
    ],
)
def test_urls(url: str, target: Target) -> None:
    assert Target.parse(url) == target


def test_a_slow_minute_of_the_machine_does_not_change_a_ratio() -> None:
    def runs(*speeds: float) -> list[Run]:
        sample = Sample(0.1, ttft=0.01, completion_tokens=1000)
        return [summarise([sample], 1000 / speed, {}) for speed in speeds]

    # Medians over all runs would give 1.1: the second pair fell into a slow minute.
    plain, drafted = runs(1000, 400, 900), runs(1500, 640, 990)
    assert paired_ratio(plain, drafted) == 1.5
    assert paired_ratio(runs(0.01), runs(5)) is None
