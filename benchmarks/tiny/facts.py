"""Questions with one right answer: the fixed tables of the world, and arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from benchmarks.tiny import world
from benchmarks.tiny.world import article


@dataclass(frozen=True)
class Exchange:
    """A question, its answer and a short thought that leads from one to the other."""

    user: str
    assistant: str
    thought: str


def fact(rng: Random) -> Exchange:
    """A question about the fixed tables of the world."""
    user, answer = rng.choice(_FACT_MAKERS)(rng)
    return Exchange(user, answer, f"The user asks a question about facts. {answer}")


def _capital(rng: Random) -> tuple[str, str]:
    country, city = rng.choice(list(world.CAPITALS.items()))
    if rng.random() < 0.25:
        asks = [
            f"{city} is the capital of which country?",
            f"Which country has the capital {city}?",
        ]
        return rng.choice(asks), f"{city} is the capital of {country}."
    asks = [
        f"What is the capital of {country}?",
        f"What's the capital of {country}?",
        f"Name the capital of {country}.",
        f"Tell me the capital of {country}.",
        f"Which city is the capital of {country}?",
        f"Capital of {country}?",
    ]
    return rng.choice(asks), f"The capital of {country} is {city}."


def _animal(rng: Random) -> tuple[str, str]:
    animal = rng.choice(list(world.ANIMALS))
    sound, young, _, food, _ = world.ANIMALS[animal]
    name = article(animal)
    return rng.choice(
        [
            (f"What sound does {name} make?", f'{name.capitalize()} says "{sound}".'),
            (f"What does {name} say?", f'{name.capitalize()} says "{sound}".'),
            (f"What is a young {animal} called?", f"A young {animal} is called {article(young)}."),
            (f"What is a baby {animal} called?", f"A baby {animal} is called {article(young)}."),
            (f"What does {name} eat?", f"{name.capitalize()} likes to eat {food}."),
        ]
    )


def _legs(rng: Random) -> tuple[str, str]:
    animal, legs = rng.choice(list(world.LEGS.items()))
    return (
        f"How many legs does {article(animal)} have?",
        f"{article(animal).capitalize()} has {legs} legs.",
    )


def _colour(rng: Random) -> tuple[str, str]:
    thing, colour = rng.choice(list(world.COLOURS_OF.items()))
    word = rng.choice(["colour", "color"])
    return f"What {word} is {thing}?", f"{thing[0].upper()}{thing[1:]} is {colour}."


def _opposite(rng: Random) -> tuple[str, str]:
    a, b = rng.choice(world.OPPOSITES)
    if rng.random() < 0.5:
        a, b = b, a
    return rng.choice(
        [f"What is the opposite of {a}?", f'What\'s the opposite of "{a}"?']
    ), f"The opposite of {a} is {b}."


def _calendar(rng: Random) -> tuple[str, str]:
    kind, table = rng.choice([("day", world.DAYS), ("month", world.MONTHS)])
    i = rng.randrange(len(table))
    here, there = table[i], table[(i + 1) % len(table)]
    if rng.random() < 0.5:
        return f"What {kind} comes after {here}?", f"The {kind} after {here} is {there}."
    return f"What {kind} comes before {there}?", f"The {kind} before {there} is {here}."


def _number(rng: Random) -> tuple[str, str]:
    i = rng.randint(1, 19)
    if rng.random() < 0.5:
        return (
            f"What number comes after {world.NUMBERS[i]}?",
            f"After {world.NUMBERS[i]} comes {world.NUMBERS[i + 1]}.",
        )
    return f"Write the number {i} as a word.", f'The number {i} is written "{world.NUMBERS[i]}".'


def _french(rng: Random) -> tuple[str, str]:
    en, fr = rng.choice(list(world.FRENCH.items()))
    return rng.choice(
        [f'How do you say "{en}" in French?', f'Translate "{en}" into French.']
    ), f'In French, "{en}" is "{fr}".'


def _continent(rng: Random) -> tuple[str, str]:
    country, where = rng.choice(list(world.CONTINENTS.items()))
    return f"Where is {country}?", f"{country} is in {where}."


def _letter_after(rng: Random) -> tuple[str, str]:
    i = rng.randrange(25)
    a, b = world.ALPHABET[i], world.ALPHABET[i + 1]
    return f"Which letter comes after {a}?", f"The letter after {a} is {b}."


def _fixed(rng: Random) -> tuple[str, str]:
    return rng.choice(world.FACTS)


_FACT_MAKERS: list[Callable[[Random], tuple[str, str]]] = [
    _capital,
    _capital,
    _capital,
    _fixed,
    _fixed,
    _fixed,
    _animal,
    _animal,
    _colour,
    _opposite,
    _calendar,
    _number,
    _french,
    _continent,
    _legs,
    _letter_after,
]


def arithmetic(rng: Random) -> Exchange:
    """Addition and subtraction up to two digits, multiplication of single digits."""
    op = rng.choice("+++--*")
    top = rng.choice([9, 9, 20, 50, 99])
    a, b = rng.randint(0, top), rng.randint(0, top)
    if op == "*":
        a, b = rng.randint(0, 9), rng.randint(0, 9)
    elif op == "-":
        a, b = max(a, b), min(a, b)
    result = {"+": a + b, "-": a - b, "*": a * b}[op]
    word = {"+": "plus", "-": "minus", "*": "times"}[op]
    asks = [
        f"What is {a} {op} {b}?",
        f"{a} {op} {b}",
        f"What is {a} {word} {b}?",
        f"Calculate {a} {op} {b}.",
        f"How much is {a} {word} {b}?",
        f"{a}{op}{b}=",
        f"{a} {op} {b} = ?",
        f"What's {a} {op} {b}?",
    ]
    return Exchange(
        rng.choice(asks),
        f"{a} {op} {b} = {result}",
        f"I have to calculate {a} {op} {b}. That is {result}.",
    )
