"""Tool-shaped conversations: definitions, questions, calls, responses and final answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from benchmarks.tiny import world

Message = dict[str, Any]
Tool = dict[str, Any]


@dataclass(frozen=True)
class ToolUse:
    """One tool at work, from its definition to the answer that uses its response."""

    tool: Tool
    user: str
    arguments: dict[str, Any]
    response: str
    answer: str


def tool(name: str, description: str, /, **parameters: str) -> Tool:
    """An OpenAI function definition; `parameters` maps a name to its JSON schema type."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in parameters.items()},
                "required": list(parameters),
            },
        },
    }


def _city(rng: Random) -> str:
    return world.made_up(rng) if rng.random() < 0.15 else rng.choice(world.CITIES)


def _weather(rng: Random) -> ToolUse:
    city, sky, t = _city(rng), rng.choice(world.WEATHER), rng.randint(-9, 35)
    key = rng.choice(["city", "city", "city", "location"])
    ask = rng.choice(
        [
            f"What is the weather in {city}?",
            f"What's the weather like in {city}?",
            f"How is the weather in {city} today?",
            f"Tell me the weather in {city}.",
            f"Is it warm in {city}?",
            f"What is the weather like in {city} right now?",
        ]
    )
    response = rng.choice(
        [
            json.dumps({"temperature": t, "sky": sky}),
            json.dumps({"city": city, "temperature": t, "sky": sky}),
            f"{sky}, {t} degrees",
        ]
    )
    description = rng.choice(
        [
            "Get the weather",
            "Get the current weather",
            "Get the weather for a city",
            "Current weather in a city",
        ]
    )
    return ToolUse(
        tool("get_weather", description, **{key: "string"}),
        ask,
        {key: city},
        response,
        f"It is {sky} in {city}, with a temperature of {t} degrees.",
    )


def _time(rng: Random) -> ToolUse:
    city, now = _city(rng), f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
    ask = rng.choice(
        [
            f"What time is it in {city}?",
            f"Tell me the time in {city}.",
            f"What is the time in {city}?",
        ]
    )
    response = rng.choice([json.dumps({"time": now}), now])
    return ToolUse(
        tool("get_time", rng.choice(["Get the time", "Get the time in a city"]), city="string"),
        ask,
        {"city": city},
        response,
        f"It is {now} in {city}.",
    )


def _sum(rng: Random) -> ToolUse:
    top = rng.choice([9, 99, 999])
    a, b = rng.randint(0, top), rng.randint(0, top)
    name, word, sign, result = rng.choice(
        [("add", "Add", "+", a + b), ("multiply", "Multiply", "*", a * b)]
    )
    ask = rng.choice(
        [
            f"What is {a} {sign} {b}?",
            f"{word} {a} and {b}.",
            f"Use the tool to {name} {a} and {b}.",
            f"Calculate {a} {sign} {b}.",
        ]
    )
    kind = rng.choice(["integer", "number"])
    return ToolUse(
        tool(name, f"{word} two numbers", a=kind, b=kind),
        ask,
        {"a": a, "b": b},
        rng.choice([str(result), json.dumps({"result": result})]),
        f"{a} {sign} {b} = {result}",
    )


def _search(rng: Random) -> ToolUse:
    topic, n = rng.choice(world.TOPICS), rng.randint(2, 9)
    ask = rng.choice(
        [
            f"Search for {topic}.",
            f"Search the web for {topic}.",
            f"Find something about {topic}.",
            f"Look up {topic}.",
        ]
    )
    return ToolUse(
        tool("search", rng.choice(["Search the web", "Search for a text"]), query="string"),
        ask,
        {"query": topic},
        json.dumps({"results": n}),
        f"I found {n} results about {topic}.",
    )


def _timer(rng: Random) -> ToolUse:
    n = rng.randint(1, 60)
    ask = rng.choice(
        [
            f"Set a timer for {n} minutes.",
            f"Start a timer for {n} minutes.",
            f"Timer for {n} minutes, please.",
        ]
    )
    return ToolUse(
        tool("set_timer", "Set a timer", minutes="integer"),
        ask,
        {"minutes": n},
        rng.choice(["ok", '{"ok": true}']),
        f"The timer is set for {n} minutes.",
    )


def _mail(rng: Random) -> ToolUse:
    name, text = (
        rng.choice(world.NAMES),
        " ".join(rng.choice(world.WORDS) for _ in range(rng.randint(1, 4))),
    )
    ask = rng.choice(
        [f"Send a message to {name}: {text}", f"Tell {name}: {text}", f"Write to {name}: {text}"]
    )
    return ToolUse(
        tool("send_message", "Send a message to a person", to="string", text="string"),
        ask,
        {"to": name, "text": text},
        rng.choice(["sent", '{"ok": true}']),
        f"I have sent the message to {name}.",
    )


def _stock(rng: Random) -> ToolUse:
    item, n = rng.choice(world.LISTS["fruits"] + world.LISTS["tools"]), rng.randint(0, 99)
    ask = rng.choice(
        [
            f"How many of the item {item} are in stock?",
            f"Check the stock of {item}.",
            f"Is the item {item} in stock?",
        ]
    )
    return ToolUse(
        tool("get_stock", "Get how many of an item are in stock", item="string"),
        ask,
        {"item": item},
        json.dumps({"count": n}),
        f"There are {n} of the item {item} in stock.",
    )


def _light(rng: Random) -> ToolUse:
    room, on = rng.choice(["kitchen", "garden", "bedroom", "hall", "cellar"]), rng.random() < 0.5
    word = "on" if on else "off"
    return ToolUse(
        tool("set_light", "Turn a light on or off", room="string", on="boolean"),
        rng.choice([f"Turn {word} the light in the {room}.", f"Switch the {room} light {word}."]),
        {"room": room, "on": on},
        rng.choice(["ok", '{"ok": true}']),
        f"The light in the {room} is {word}.",
    )


def _any(rng: Random) -> ToolUse:
    """A tool with a name that was never seen, so that names are copied and not only remembered."""
    verb = rng.choice(
        ["find", "open", "book", "read", "order", "play", "lookup", "show", "create", "delete"]
    )
    noun, key = (
        rng.choice(world.WORDS).replace(" ", "_"),
        rng.choice(["name", "id", "text", "title", "item", "value", "topic", "x"]),
    )
    value = rng.choice(world.WORDS + world.NAMES + world.CITIES)
    if rng.random() < 0.3:
        value = world.made_up(rng, capital=rng.random() < 0.5)
    name = f"{verb}_{noun}"
    said = noun.replace("_", " ")
    ask = rng.choice(
        [
            f"{verb.capitalize()} the {said} {value}.",
            f"Please {verb} the {said} with {key} {value}.",
            f"Call {name} with {value}.",
        ]
    )
    return ToolUse(
        tool(name, f"{verb.capitalize()} {world.article(said)}", **{key: "string"}),
        ask,
        {key: value},
        rng.choice(["ok", '{"ok": true}', "done"]),
        f"Done: {verb} the {said} {value}.",
    )


_USES: list[Callable[[Random], ToolUse]] = [
    _weather,
    _weather,
    _weather,
    _time,
    _sum,
    _sum,
    _search,
    _timer,
    _mail,
    _stock,
    _light,
    _any,
    _any,
]


def tool_use(rng: Random) -> ToolUse:
    """One use of a tool of the world, or now and then of a made-up one."""
    use = rng.choice(_USES)(rng)
    return replace(use, tool=_dressed(rng, use.tool)) if rng.random() < 0.35 else use


def _dressed(rng: Random, tool: Tool) -> Tool:
    """The same tool as other clients send it: described, strict or longer."""
    function = dict(tool["function"])
    schema = dict(function["parameters"])
    if rng.random() < 0.7:
        form = rng.choice(["The {}", "{}", "The {} to use", "Name of the {}"])
        schema["properties"] = {
            key: value | {"description": form.format(key)}
            for key, value in schema["properties"].items()
        }
    if rng.random() < 0.2:
        schema["additionalProperties"] = False
    if rng.random() < 0.2:
        function["description"] += rng.choice([" for the user", ".", " by name", " right now"])
    function["parameters"] = schema
    if rng.random() < 0.15:
        function["strict"] = True
    return tool | {"function": function}


def two_cities(rng: Random) -> tuple[ToolUse, ToolUse]:
    """The same question for two cities, to be answered by two calls in one turn."""
    make = rng.choice([_weather, _time])
    first = make(rng)
    while "city" not in first.arguments or not first.user.endswith(
        f" in {first.arguments['city']}?"
    ):
        first = make(rng)
    second = make(rng)
    while "city" not in second.arguments or second.arguments == first.arguments:
        second = make(rng)
    return first, second


def toolbox(rng: Random, *needed: Tool) -> list[Tool]:
    """The needed tools and zero to two others, shuffled; names are unique."""
    tools = {t["function"]["name"]: t for t in needed}
    for _ in range(rng.choice([0, 0, 0, 1, 1, 2])):
        other = tool_use(rng).tool
        tools.setdefault(other["function"]["name"], other)
    box = list(tools.values())
    rng.shuffle(box)
    return box


def call_message(*uses: ToolUse, thought: str = "") -> Message:
    """The assistant turn that makes the calls."""
    calls = [
        {
            "type": "function",
            "function": {"name": u.tool["function"]["name"], "arguments": u.arguments},
        }
        for u in uses
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls} | (
        {"reasoning_content": thought} if thought else {}
    )


def use_messages(use: ToolUse, thought: str = "") -> list[Message]:
    """Question, call, response, answer."""
    return [
        {"role": "user", "content": use.user},
        call_message(use, thought=thought),
        {"role": "tool", "content": use.response},
        {"role": "assistant", "content": use.answer},
    ]
