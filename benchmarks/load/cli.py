"""Flags of `spark bench` and the order of a measurement: warm up, loop, repeat, report."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

from rich.console import Console

from benchmarks.load.compare import compare
from benchmarks.load.loop import Run, median_of, run_loop
from benchmarks.load.processes import ServerStartError, spawned_server
from benchmarks.load.prompts import PromptKind, PromptSource, Shape, first_model, token_pool
from benchmarks.load.report import json_line, table
from benchmarks.load.wire import Target, WireError

DEFAULT_URL = "http://127.0.0.1:8000"
WARM_UP_TOKENS = 16


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def _levels(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Read the flags; what follows `--` goes to the server that --spawn starts."""
    parser = argparse.ArgumentParser(
        prog="spark bench",
        description="Measure any OpenAI-compatible server with a closed loop of streaming clients. "
        "Prints a table, then one line of JSON; the exit code is 1 if any request failed.",
        epilog="example: spark bench --spawn --concurrency 1,32 -- --max-batch-size 64",
    )
    where = parser.add_argument_group("target")
    where.add_argument("--url", default=None, help=f"server to measure (default {DEFAULT_URL})")
    where.add_argument(
        "--spawn",
        action="store_true",
        help="start a server on a free port; flags after -- are its flags",
    )
    where.add_argument(
        "--compare-speculation",
        action="store_true",
        help="start two servers, one with --speculative, and measure them in turn "
        "on prose and tool-shaped prompts",
    )
    where.add_argument(
        "--server-pid",
        type=_positive,
        metavar="PID",
        help="pid of a local server, to report its processor time",
    )
    where.add_argument("--model", help="model to ask for (default: the first one listed)")
    where.add_argument(
        "--api-key",
        default=os.environ.get("OPENAI_API_KEY"),
        help="bearer token (default: OPENAI_API_KEY)",
    )
    load = parser.add_argument_group("load")
    load.add_argument(
        "--concurrency",
        type=_levels,
        default=[1, 8, 32, 128],
        metavar="N,N",
        help="clients at once, one measurement each (default 1,8,32,128)",
    )
    load.add_argument(
        "--prompts",
        type=PromptKind,
        choices=list(PromptKind),
        default=PromptKind.RANDOM,
        help="random text of an exact length, or "
        "chats that want prose or a tool call (default random)",
    )
    load.add_argument("--prompt-tokens", type=_positive, default=64, help="default 64")
    load.add_argument("--output-tokens", type=_positive, default=128, help="default 128")
    load.add_argument(
        "--ignore-eos",
        action="store_true",
        help="generate all output tokens; fewer count as a failure",
    )
    load.add_argument("--temperature", type=float, default=0.0, help="default 0")
    load.add_argument(
        "--requests",
        type=_positive,
        help="per run (default: twice the clients, at least 16; comparing: 8 times, at least 32)",
    )
    load.add_argument("--runs", type=_positive, default=3, help="median of this many (default 3)")
    load.add_argument("--seed", type=int, default=0, help="of the prompts (default 0)")
    load.add_argument("--timeout", type=float, default=300.0, help="s per request (default 300)")
    argv, flags = _split(argv)
    args = parser.parse_args(argv)
    starts = args.spawn or args.compare_speculation
    if starts and (args.url or args.server_pid):
        parser.error("own servers are started: leave out --url and --server-pid")
    if flags and not starts:
        parser.error(f"flags after -- ({' '.join(flags)}) need --spawn or --compare-speculation")
    args.serve_flags = flags
    return args


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    if "--" not in argv:
        return list(argv), []
    cut = list(argv).index("--")
    return list(argv[:cut]), list(argv[cut + 1 :])


async def measure(args: argparse.Namespace, console: Console) -> list[dict[str, object]]:
    """All levels of concurrency against one server; one row each.

    Raises:
        ValueError, OSError, WireError, ServerStartError: the target cannot be measured at all.
    """
    async with AsyncExitStack() as stack:
        if args.spawn:
            console.print("starting a server", style="dim")
            target, pid = await stack.enter_async_context(
                spawned_server(args.serve_flags, args.api_key)
            )
        else:
            target, pid = Target.parse(args.url or DEFAULT_URL, args.api_key), args.server_pid
        args.model = args.model or await first_model(target)
        pool = await token_pool(target, args.model)
        shape = Shape(
            args.prompts,
            args.prompt_tokens,
            args.output_tokens,
            args.ignore_eos,
            args.temperature,
            args.model,
        )
        source = PromptSource(shape, pool, args.seed)
        rows = []
        for level in args.concurrency:
            await _warm_up(target, shape, pool, level, args)
            runs = [await _one_run(target, source, level, pid, args) for _ in range(args.runs)]
            rows.append(median_of(runs, level))
            console.print(f"{level} clients: {rows[-1]['tok_s']} tok/s", style="dim")
        return rows


async def _warm_up(
    target: Target, shape: Shape, pool: list[int] | None, level: int, args: argparse.Namespace
) -> None:
    """One short round of prompts that are not measured later."""
    short = replace(shape, output_tokens=min(WARM_UP_TOKENS, shape.output_tokens))
    jobs = PromptSource(short, pool, args.seed + 7919 + level).take(level)
    await run_loop(target, jobs, level, None, args.timeout)


async def _one_run(
    target: Target, source: PromptSource, level: int, pid: int | None, args: argparse.Namespace
) -> Run:
    count = args.requests or max(2 * level, 16)
    return await run_loop(target, source.take(count), level, pid, args.timeout)


def main(argv: Sequence[str] | None = None) -> int:
    """`spark bench`: exit code 0, 1 if any request failed, 2 if nothing could be measured."""
    args = parse_args(sys.argv[1:] if argv is None else argv)
    progress = Console(stderr=True)
    try:
        if args.compare_speculation:
            return asyncio.run(compare(args, progress))
        rows = asyncio.run(measure(args, progress))
    except (ValueError, OSError, WireError, ServerStartError) as error:
        progress.print(f"spark bench: {error}", markup=False)
        return 2
    except KeyboardInterrupt:
        return 130
    kind = args.prompts.value
    lengths = f"{args.output_tokens} new tokens" + (", ignore_eos" if args.ignore_eos else "")
    prompt = f"{args.prompt_tokens}-token prompts" if kind == "random" else f"{kind} prompts"
    print(table(rows, f"{args.model}: {prompt}, {lengths}, median of {args.runs}"))
    summary = {
        "bench": "load",
        "model": args.model,
        "prompts": kind,
        "prompt_tokens": args.prompt_tokens if kind == "random" else None,
        "output_tokens": args.output_tokens,
        "ignore_eos": args.ignore_eos,
        "runs": args.runs,
        "cores": os.cpu_count(),
        "levels": rows,
    }
    print(json_line(summary))
    return 1 if any(row["failed"] for row in rows) else 0
