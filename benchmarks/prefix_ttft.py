"""A system prompt of 2,000 tokens that many chats share: time to the first token, cold and warm.

Drives a real server, one request at a time. A cold request is one of a tenant that nobody was
before; its warm twin asks the same of the tenant that all warm ones share, and must get the same
answer. With eviction other prompts come between them. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.load.processes import spawned_server
from benchmarks.load.wire import Target
from benchmarks.spec_matrix import model_folder
from engine.config import GRID
from spark_server.text.model import TextModel, load_text_model

SHARED_TOKENS = 2000
LEAST_CACHED = SHARED_TOKENS // GRID * GRID
LEAST_RATIO = 5.0
OUTPUT_TOKENS = 4
TEXT = (
    "the old mill stands by the river and its wheel turns all day while the miller sleeps "
    "a grey cat watches boats go by and thinks of fish until the sun is low"
)


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer; `ttft` in seconds from the request to the first text."""

    ttft: float
    text: str
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Pair:
    """The same chat cold and warm; `noise` prompts of others came before the warm one."""

    cold: Answer
    warm: Answer
    noise: int

    @property
    def hit(self) -> bool:
        """Whether the warm one reused anything."""
        return self.warm.cached_tokens > 0


class Chats:
    """Chats of one system prompt, as long as it takes to share SHARED_TOKENS tokens."""

    def __init__(self, text: TextModel, seed: int = 0) -> None:
        self._rng = random.Random(seed)
        self._words = TEXT.split()
        self._text = text
        self.system = ""
        while self.shared_tokens() < SHARED_TOKENS:
            self.system += " ".join(self._rng.choices(self._words, k=12)) + ". "

    def shared_tokens(self) -> int:
        """Tokens that all chats begin with."""
        one, other = (self.tokens(user) for user in ("a cat", "why not"))
        return next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)

    def tokens(self, user: str) -> tuple[int, ...]:
        """The rendered chat."""
        return self._text.render_chat(self.messages(user), None, {}).token_ids

    def messages(self, user: str) -> list[dict[str, str]]:
        """As the API takes them."""
        return [{"role": "system", "content": self.system}, {"role": "user", "content": user}]

    def user(self) -> str:
        """A question that nobody asked before."""
        return " ".join(self._rng.choices(self._words, k=8)) + f" {self._rng.randrange(10**6)}?"

    def other(self) -> list[dict[str, str]]:
        """A long chat that shares nothing with them."""
        words = " ".join(self._rng.choices(self._words, k=self._rng.randrange(100, 400)))
        return [{"role": "user", "content": f"{self._rng.randrange(10**6)} {words}"}]


def ask(target: Target, messages: list[dict[str, str]], salt: str) -> Answer:
    """Stream one greedy answer.

    Raises:
        RuntimeError: the server did not answer as it should.
    """
    body = {
        "messages": messages,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": salt,
    }
    connection = http.client.HTTPConnection(target.host, target.port, timeout=60)
    began = time.perf_counter()
    connection.request(
        "POST",
        "/v1/chat/completions",
        json.dumps(body),
        {"Content-Type": "application/json"},
    )
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"HTTP {response.status}: {response.read()[:300]!r}")
    first, text = 0.0, ""
    usage: dict[str, Any] = {}
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            piece = choice["delta"].get("content") or ""
            if piece and not text:
                first = time.perf_counter() - began
            text += piece
    connection.close()
    if not text or not usage:
        raise RuntimeError("the stream had no text or no usage")
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Answer(first, text, usage["prompt_tokens"], cached)


def measure(target: Target, chats: Chats, pairs: int, evict: bool, seed: int) -> list[Pair]:
    """`pairs` chats cold and warm in turn, after one that fills the cache."""
    rng = random.Random(seed)
    ask(target, chats.messages(chats.user()), "warm")
    found = []
    for number in range(pairs):
        messages = chats.messages(chats.user())
        cold = ask(target, messages, f"cold {seed} {number}")
        noise = rng.randrange(4) if evict else 0
        for n in range(noise):
            ask(target, chats.other(), f"other {seed} {number} {n}")
        found.append(Pair(cold, ask(target, messages, "warm"), noise))
    return found


def report(pairs: Sequence[Pair], evict: bool) -> dict[str, object]:
    """Prints a table, and gives its numbers."""
    hits = [pair for pair in pairs if pair.hit]
    cold = statistics.median(pair.cold.ttft for pair in pairs)
    warm = statistics.median(pair.warm.ttft for pair in hits) if hits else float("nan")
    numbers: dict[str, object] = {
        "eviction": evict,
        "pairs": len(pairs),
        "prompt_tokens": max(pair.cold.prompt_tokens for pair in pairs),
        "hits": len(hits),
        "hit_rate": round(len(hits) / len(pairs), 3),
        "cold_ms": round(1e3 * cold, 1),
        "warm_ms": round(1e3 * warm, 1),
        "ratio": round(cold / warm, 2),
        "least_cached": min((pair.warm.cached_tokens for pair in hits), default=0),
        "different_answers": sum(pair.cold.text != pair.warm.text for pair in pairs),
    }
    print("  ".join(f"{name} {value}" for name, value in numbers.items()), flush=True)
    return numbers


def good(numbers: dict[str, object]) -> bool:
    """Whether the numbers are what the cache promises."""
    return (
        float(str(numbers["ratio"])) >= LEAST_RATIO
        and int(str(numbers["least_cached"])) >= LEAST_CACHED
        and numbers["different_answers"] == 0
        and (numbers["eviction"] is True or numbers["hits"] == numbers["pairs"])
    )


async def measured(evict: bool, pairs: int, seed: int, flags: Sequence[str]) -> dict[str, object]:
    """Start a server and measure; with eviction it has room for few states and blocks."""
    chats = Chats(load_text_model(model_folder()), seed)
    words = ["--max-seq-len", "4096", "--max-batch-size", "4", *flags]
    if evict:
        words += ["--ssm-cache-slots", "4", "--kv-tokens", "8192"]
    async with spawned_server(words) as (target, _):
        found = await asyncio.to_thread(measure, target, chats, pairs, evict, seed)
    return report(found, evict)


def main(argv: Sequence[str] | None = None) -> int:
    """Both servers; the exit code is 1 when a promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=25, help="of a cold and a warm request")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("flags", nargs="*", help="further flags of the server, after --")
    asked = parser.parse_args(argv)
    results = [
        asyncio.run(measured(evict, asked.pairs, asked.seed, asked.flags))
        for evict in (False, True)
    ]
    verdict = all(good(numbers) for numbers in results)
    print(json.dumps({"bench": "prefix_ttft", "good": verdict, "runs": results}))
    return 0 if verdict else 1


if __name__ == "__main__":
    sys.exit(main())
