"""What the load generator asks: random distinct prompts of a given length, prose or tool calls.

Learns the target's tokens through /tokenize where there is one, else counts words.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from benchmarks.load.measure import Job
from benchmarks.load.wire import Connection, Target, WireError
from benchmarks.tiny.corpus import prose_prompts, tool_prompts

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = (
    "river stone morning garden window letter summer winter bread water friend house small bright "
    "quiet yellow green mountain walked found carried opened listened under over before again "
    "little mother teacher market forest lamp story road cloud boat apple table paper bird"
)
WORDS = tuple(TEXT.split())


class PromptKind(StrEnum):
    """RANDOM: plain text of an exact length. PROSE and TOOL: chats of spark-tiny's world."""

    RANDOM = "random"
    PROSE = "prose"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class Shape:
    """What every request has in common. Lengths in tokens."""

    kind: PromptKind
    prompt_tokens: int
    output_tokens: int
    ignore_eos: bool
    temperature: float
    model: str

    def body(self) -> dict[str, object]:
        """The part of the body that is the same for all prompts."""
        body: dict[str, object] = {
            "model": self.model,
            "max_tokens": self.output_tokens,
            "temperature": self.temperature,
        }
        return body | {"ignore_eos": True} if self.ignore_eos else body


class PromptSource:
    """Makes jobs; random prompts never come twice."""

    def __init__(self, shape: Shape, pool: Sequence[int] | None, seed: int) -> None:
        """`pool`: token ids that occur in ordinary text, or None if the target tells none."""
        self._shape = shape
        self._pool = pool
        self._rng = Random(f"spark bench {seed}")
        self._made = 0
        self._seed = seed

    def take(self, count: int) -> list[Job]:
        """The next `count` jobs."""
        shape, expect = self._shape, self._shape.output_tokens if self._shape.ignore_eos else None
        self._made += 1
        seed = self._seed * 1_000_003 + self._made
        if shape.kind is PromptKind.PROSE:
            chats = prose_prompts(seed, count)
            return [Job(CHAT, shape.body() | {"messages": chat}, expect) for chat in chats]
        if shape.kind is PromptKind.TOOL:
            return [
                Job(CHAT, shape.body() | {"messages": messages, "tools": tools}, expect)
                for messages, tools in tool_prompts(seed, count)
            ]
        return [
            Job(COMPLETIONS, shape.body() | {"prompt": self._random_prompt()}, expect)
            for _ in range(count)
        ]

    def _random_prompt(self) -> list[int] | str:
        if self._pool is None:
            return " ".join(self._rng.choices(WORDS, k=self._shape.prompt_tokens))
        return self._rng.choices(self._pool, k=self._shape.prompt_tokens)


async def fetch_text(target: Target, path: str, body: object = None) -> tuple[int, str]:
    """GET (without a body) or POST, and the status with the answer's text.

    Raises:
        OSError, WireError: the server does not answer.
    """
    payload = b"" if body is None else json.dumps(body).encode()
    pieces: list[bytes] = []
    connection = await Connection.open(target)
    try:
        head = target.head("GET" if body is None else "POST", path, len(payload))
        status = await connection.request(head, payload, lambda data, _: pieces.append(data))
    finally:
        connection.close()
    return status, b"".join(pieces).decode("utf-8", "replace")


async def fetch_json(target: Target, path: str, body: object = None) -> tuple[int, object]:
    """As fetch_text, with the parsed answer (None if it is no JSON)."""
    status, text = await fetch_text(target, path, body)
    try:
        return status, json.loads(text)
    except ValueError:
        return status, None


async def first_model(target: Target) -> str:
    """The id of the first model that the server lists.

    Raises:
        WireError: it lists none.
    """
    status, answer = await fetch_json(target, "/v1/models")
    if status == 200 and isinstance(answer, dict) and answer.get("data"):
        return str(answer["data"][0]["id"])
    raise WireError(f"GET /v1/models answered {status} and no model; name one with --model")


async def token_pool(target: Target, model: str) -> list[int] | None:
    """Ids of ordinary text in the target's own vocabulary, or None where /tokenize is missing."""
    text = " ".join(Random("pool").choices(WORDS, k=400))
    status, answer = await fetch_json(target, "/tokenize", {"model": model, "prompt": text})
    if status != 200 or not isinstance(answer, dict) or not answer.get("tokens"):
        return None
    # The first token may be a begin-of-text mark.
    return sorted(set(answer["tokens"][1:]))
