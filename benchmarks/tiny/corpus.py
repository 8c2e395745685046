"""Endless seeded documents of a small world, chats and raw text; knows no tokens, no templates."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from benchmarks.tiny import chats, facts, stories, toolcalls, world
from benchmarks.tiny.facts import Exchange
from benchmarks.tiny.toolcalls import Message, Tool

#: Documents of the held-out split are those whose text falls into this share of a hash. The kinds
#: that are closed tables to be learned by heart are never held out.
HELD_OUT_SHARE = 1 / 32
_BY_HEART = ("fact", "talk", "list")


@dataclass(frozen=True)
class Document:
    """Either raw text or a chat with its tools; `kind` names the generator."""

    kind: str
    text: str = ""
    messages: list[Message] = field(default_factory=list)
    tools: list[Tool] = field(default_factory=list)

    def key(self) -> str:
        """What decides whether two documents are the same and which split they are in."""
        return self.text or json.dumps([self.messages, self.tools], sort_keys=True)


#: How many documents of each kind, and the same for the start of a training run: copying is what a
#: small model learns last, and nearly everything else it has to do rests on it.
MIX = {
    "prose": 14,
    "raw": 9,
    "again": 4,
    "fact": 17,
    "arithmetic": 15,
    "list": 5,
    "json": 5,
    "talk": 4,
    "unknown": 2,
    "echo": 12,
    "multi": 9,
    "tool": 16,
}
COPYING_MIX = {
    "prose": 6,
    "raw": 3,
    "again": 28,
    "fact": 12,
    "arithmetic": 8,
    "list": 2,
    "json": 6,
    "talk": 2,
    "unknown": 3,
    "echo": 36,
    "multi": 4,
    "tool": 7,
}
_SINGLE = {
    "prose": chats.prose,
    "fact": facts.fact,
    "arithmetic": facts.arithmetic,
    "list": chats.listing,
    "json": chats.json_object,
    "talk": chats.small_talk,
    "unknown": chats.unknown,
    "echo": chats.echo,
}
_SYSTEM = [
    "You are a helpful assistant.",
    "You are Spark Tiny, a very small model.",
    "Answer in a short sentence.",
    "You are a friendly assistant.",
    "Be brief.",
    "You are a helpful and honest assistant.",
]
_THINKING_SHARE = 0.1


def documents(seed: int, held_out: bool = False, mix: dict[str, int] = MIX) -> Iterator[Document]:
    """All documents of a seed, in order; the two splits never share a document."""
    rng = Random(f"spark-tiny {seed}")
    while True:
        doc = _document(rng, mix)
        if (doc.kind not in _BY_HEART and _hash(doc.key()) < HELD_OUT_SHARE) == held_out:
            yield doc


def prose_prompts(seed: int, n: int) -> list[list[Message]]:
    """Chats that ask for a story, a poem, a letter or a description."""
    rng = Random(f"prose prompts {seed}")
    return [[{"role": "user", "content": chats.prose(rng).user}] for _ in range(n)]


def tool_prompts(seed: int, n: int) -> list[tuple[list[Message], list[Tool]]]:
    """Chats with tools; every other one already holds the call and the tool's response."""
    rng, out = Random(f"tool prompts {seed}"), []
    for i in range(n):
        use = toolcalls.tool_use(rng)
        messages = toolcalls.use_messages(use)[: 1 if i % 2 == 0 else 3]
        out.append((messages, toolcalls.toolbox(rng, use.tool)))
    return out


def _hash(text: str) -> float:
    """A number in [0, 1) that is the same in every process."""
    value = 2166136261
    for byte in text.encode():
        value = ((value ^ byte) * 16777619) & 0xFFFFFFFF
    value = ((value ^ (value >> 15)) * 2246822519) & 0xFFFFFFFF
    return (value ^ (value >> 13)) / 2**32


def _document(rng: Random, mix: dict[str, int]) -> Document:
    kind = rng.choices(list(mix), list(mix.values()))[0]
    if kind == "raw":
        return Document("raw", text=_raw(rng))
    if kind == "again":
        return Document("again", text=_again(rng))
    if kind == "tool":
        return _tool_chat(rng)
    if kind == "multi":
        return Document("multi", messages=_chat(rng, _several(rng)))
    exchanges = [_rough(rng, _SINGLE[kind](rng))]
    if kind in ("arithmetic", "fact") and rng.random() < 0.3:
        exchanges += [_SINGLE[kind](rng) for _ in range(rng.randint(1, 3))]
    return Document(kind, messages=_chat(rng, exchanges))


def _chat(rng: Random, exchanges: list[Exchange]) -> list[Message]:
    """Messages of a chat, with a system turn and a thought now and then."""
    messages: list[Message] = []
    if rng.random() < 0.25:
        messages.append({"role": "system", "content": rng.choice(_SYSTEM)})
    elif rng.random() < 0.04:  # a long one, as a shared prefix would be
        text = " ".join(stories.story(rng) for _ in range(rng.randint(1, 3)))
        messages.append({"role": "system", "content": f"{rng.choice(_SYSTEM)}\n\n{text}"})
    for exchange in exchanges:
        messages.append({"role": "user", "content": exchange.user})
        messages.append({"role": "assistant", "content": exchange.assistant})
    if rng.random() < _THINKING_SHARE:
        messages[-1]["reasoning_content"] = exchanges[-1].thought
    if rng.random() < 0.02:
        name = rng.choice(world.NAMES)
        messages = [
            {"role": "system", "content": f"Your name is {name}."},
            {"role": "user", "content": rng.choice(["Who are you?", "What is your name?"])},
            {"role": "assistant", "content": f"I am {name}. How can I help you?"},
        ]
    return messages


def _rough(rng: Random, exchange: Exchange) -> Exchange:
    """The same question as people type it: politely, in lower case or without a question mark."""
    user = exchange.user
    roll = rng.random()
    if roll < 0.05 and not user.startswith(("Repeat", "Say", "Echo")):
        user = user.lower()
    elif roll < 0.09:
        user = user.rstrip("?.")
    elif roll < 0.14 and user[:1].isalpha():
        user = (
            rng.choice(["Please tell me: ", "Hello! ", "Hi, ", "I have a question: ", "Question: "])
            + user
        )
    elif roll < 0.17:
        user += rng.choice([" Please.", " Thanks!", " Be brief."])
    return Exchange(user, exchange.assistant, exchange.thought)


def _several(rng: Random) -> list[Exchange]:
    """Two to five exchanges of mixed kinds; often a recall with something in between."""
    kinds = ["fact", "arithmetic", "list", "talk", "echo", "json", "fact", "unknown", "talk"]
    middle = [_rough(rng, _SINGLE[rng.choice(kinds)](rng)) for _ in range(rng.randint(0, 3))]
    if rng.random() < 0.5:
        first, last = chats.recall(rng)
        return [first, *middle, last]
    return [chats.small_talk(rng), *middle, _SINGLE[rng.choice(["fact", "prose", *kinds])](rng)]


def _tool_chat(rng: Random) -> Document:
    use = toolcalls.tool_use(rng)
    box = toolcalls.toolbox(rng, use.tool)
    messages: list[Message] = []
    if rng.random() < 0.2:
        messages.append({"role": "system", "content": rng.choice(_SYSTEM)})
    roll = rng.random()
    if roll < 0.16:  # tools are there, but the question does not need one
        exchange = _SINGLE[rng.choice(["fact", "talk", "talk", "list", "prose"])](rng)
        messages += [
            {"role": "user", "content": exchange.user},
            {"role": "assistant", "content": exchange.assistant},
        ]
        return Document("tool", messages=messages, tools=box)
    if roll < 0.26:  # small talk first
        talk = chats.small_talk(rng)
        messages += [
            {"role": "user", "content": talk.user},
            {"role": "assistant", "content": talk.assistant},
        ]
    if roll > 0.93:  # two calls in one turn
        return _two_calls(rng, messages)
    name = use.tool["function"]["name"]
    messages += toolcalls.use_messages(
        use, f"I will call {name}." if rng.random() < _THINKING_SHARE else ""
    )
    if roll > 0.83:  # the same tool once more
        again = toolcalls.tool_use(rng)
        if (
            again.tool["function"]["name"] == name
            and again.arguments.keys() == use.arguments.keys()
        ):
            messages += toolcalls.use_messages(again)
    return Document("tool", messages=messages, tools=box)


def _two_calls(rng: Random, messages: list[Message]) -> Document:
    first, second = toolcalls.two_cities(rng)
    user = f"{first.user[:-1]} and in {second.arguments['city']}?"
    messages = [
        *messages,
        {"role": "user", "content": user},
        toolcalls.call_message(first, second),
        {"role": "tool", "content": first.response},
        {"role": "tool", "content": second.response},
        {"role": "assistant", "content": f"{first.answer} {second.answer}"},
    ]
    return Document("tool", messages=messages, tools=toolcalls.toolbox(rng, first.tool))


def _raw(rng: Random) -> str:
    """Text without chat turns, for plain completions."""
    kind = rng.choice(
        ["story"] * 6
        + [
            "alphabet",
            "count",
            "calendar",
            "facts",
            "facts",
            "sums",
            "sums",
            "portrait",
        ]
    )
    if kind == "story":
        return stories.story(rng)
    if kind == "alphabet":
        sep = rng.choice([" ", ", ", "\n"])
        letters = world.ALPHABET if rng.random() < 0.6 else world.ALPHABET.lower()
        return sep.join(letters)
    if kind == "count":
        start = rng.choice([1, 1, 1, rng.randint(1, 60)])
        return rng.choice([", ", " ", "\n"]).join(
            map(str, range(start, start + rng.randint(8, 30)))
        )
    if kind == "calendar":
        return rng.choice([", ", "\n", " "]).join(
            rng.choice([world.DAYS, world.MONTHS, world.NUMBERS[1:13]])
        )
    if kind == "sums":
        return "\n".join(facts.arithmetic(rng).assistant for _ in range(rng.randint(3, 9)))
    if kind == "portrait":
        return "\n\n".join(
            stories.portrait(rng, rng.choice(list(world.ANIMALS))) for _ in range(rng.randint(1, 2))
        )
    return " ".join(facts.fact(rng).assistant for _ in range(rng.randint(2, 5)))


def _again(rng: Random) -> str:
    """A few words, some of them made up, and the same words again."""
    pool = world.WORDS + world.NAMES
    share = rng.choice([0.0, 0.2, 0.6])
    words = [
        world.made_up(rng, capital=rng.random() < 0.3) if rng.random() < share else rng.choice(pool)
        for _ in range(rng.randint(2, 14))
    ]
    return rng.choice([" ", "\n", ", ", ". "]).join([" ".join(words)] * rng.randint(2, 4))


def parse_call(text: str) -> list[tuple[str, dict[str, str]]]:
    """Names and raw string arguments of the calls in an assistant turn of the XML dialect."""
    calls = []
    for body in re.findall(r"<tool_call>\n(.*?)\n</tool_call>", text, re.DOTALL):
        head = re.fullmatch(r"<function=([^>\n]+)>\n(.*)</function>", body, re.DOTALL)
        if head is None:
            raise ValueError(f"not a call of the XML dialect: {body!r}")
        pairs = re.findall(r"<parameter=([^>\n]+)>\n(.*?)\n</parameter>\n", head[2], re.DOTALL)
        calls.append((head[1], dict(pairs)))
    return calls
