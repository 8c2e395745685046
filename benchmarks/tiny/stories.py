"""Prose of the corpus: stories, poems, letters and descriptions with free choices."""

from __future__ import annotations

from random import Random

from benchmarks.tiny import world
from benchmarks.tiny.world import article

_OPENINGS = [
    "Once upon a time there was {a_hero} named {name}, who lived {near} the {place}.",
    "{name} was {a_hero} who lived {near} {a_place}.",
    "In a quiet {place} there lived {a_hero} called {name}.",
    "Long ago, {near} {a_place}, there lived {a_hero} whose name was {name}.",
]
_MORNINGS = [
    "One {weather} morning {name} woke up early and felt {feeling}.",
    "One {weather} day {name} went for a walk with {friend} the {other}.",
    "It was {a_weather} day, and {name} was looking for something to do.",
]
_PLOTS: list[list[list[str]]] = [
    [  # a thing is found and given back
        [
            "On the path {name} found {an_adj} {object}.",
            "Under {a_tree} tree {name} saw {an_adj} {object}.",
            "Beside the river lay {an_adj} {object}.",
        ],
        [
            '"Whose {object} is this?" {name} asked.',
            "{name} picked it up and looked at it for a long time.",
            '"Somebody must be missing this," said {name}.',
        ],
        [
            "{name} asked {friend} the {other}, but {friend} only shook {their} head.",
            '{friend} the {other} came by and said, "It belongs to the {job}."',
        ],
        [
            "So {name} walked all the way to the {place2} and knocked on the door of the {job}.",
            "Together they carried the {object} to the {job} in the {place2}.",
        ],
        [
            'The {job} laughed with joy and said, "Thank you, {name}!"',
            "The {job} was so {feeling2} that there was warm bread for everyone.",
        ],
    ],
    [  # a storm
        [
            "Then dark clouds came over the {place2}, and the wind began to blow.",
            "In the afternoon a storm came up, and the rain fell hard.",
        ],
        [
            "{name} heard a small voice calling for help.",
            "Someone was crying behind the {tree} tree.",
        ],
        [
            "It was {friend} the {other}, who had lost the way home.",
            "There sat {friend} the {other}, cold and wet.",
        ],
        [
            '"Come with me," said {name}. "My house is warm and dry."',
            "{name} held up {an_adj} {object} so that {friend} could see the way.",
        ],
        [
            "They drank hot {drink} and waited until the storm was over.",
            "They sat by the fire, ate {fruit} cake and told each other stories.",
        ],
    ],
    [  # a journey
        [
            "{name} had always wanted to see the {place2}.",
            "An {job2} told {name} about the {place2} far away.",
        ],
        [
            "So {name} packed {an_adj} {object}, some bread and {a_fruit}, and set out.",
            "{name} took {an_adj} {object} and left before the sun was up.",
        ],
        [
            "On the way {name} met {friend} the {other}, and they walked on together.",
            "After {number} days {name} met {friend} the {other} at a bridge.",
        ],
        [
            "They crossed a river, climbed a hill and slept under the stars.",
            "The road was long, but they sang songs all the way.",
        ],
        [
            "At last they saw the {place2}, and it was more beautiful than they had dreamed.",
            "When they came to the {place2}, the {job} welcomed them with {fruit} cake.",
        ],
    ],
    [  # a garden
        [
            "{name} planted {number} seeds behind the house.",
            "{name} wanted to grow {fruit} trees in the garden.",
        ],
        ["Every day {name} gave them water and waited.", "Days went by, and nothing happened."],
        [
            '"Be patient," said {friend} the {other}.',
            '"Good things take time," said {friend} the {other}.',
        ],
        [
            "Then, one {weather2} morning, the first green leaf came out.",
            "After {number} weeks there was a flower, and then another.",
        ],
        [
            "In autumn there was so much fruit that {name} shared it with the whole village.",
            "{name} gave the first {fruit} to {friend}, and it was sweet.",
        ],
    ],
    [  # a contest
        [
            "There was a race in the {place2} that day.",
            "The {job} of the {place2} had called for a race.",
        ],
        [
            "{friend} the {other} was very fast and very proud.",
            "Nobody thought that {name} could win against {friend} the {other}.",
        ],
        [
            "They ran past the {tree} tree and over the bridge.",
            "{name} ran slowly but never stopped.",
        ],
        [
            "Near the end {friend} fell over {an_adj} {object}.",
            "Then {friend} stopped to rest and fell asleep.",
        ],
        [
            "{name} turned back to help, and they came in together.",
            "{name} won the race and gave the prize, {an_adj} {object}, to {friend}.",
        ],
    ],
]
_NEXT_DAYS = [
    "The next day it was {weather}, and {name} felt {feeling}.",
    "A week later {name} went out again.",
    "The next morning {name} met {friend} the {other} at the gate.",
]
_ENDINGS = [
    "From that day on, {name} and {friend} were best friends.",
    "{name} went home {feeling2} and slept well that night.",
    "And so they all lived happily ever after.",
    "That evening {name} looked up at the stars and smiled.",
    "And {name} never forgot that day in the {place2}.",
]
_POEMS = [
    [
        "The {t} is {adj} in the morning light,",
        "it sings to the moon in the middle of the night,",
        "it dances with the wind, it plays with the rain,",
        "and tomorrow the {t} will be here again.",
    ],
    [
        "O {t}, little {t}, so {adj} and so dear,",
        "I am always {feeling} when you are near,",
        "the sun may go down and the day may be done,",
        "but you shine in my heart like the morning sun.",
    ],
    [
        "I saw {a_t} beside the sea,",
        "it was {adj} and it smiled at me,",
        "I gave it a {object} and a song,",
        "and we were {feeling} all day long.",
    ],
]
_PLACE_SENTENCES = [
    "The {place} is {adj} and quiet.",
    "In the morning you can hear the {animals} there.",
    "There is {an_adj} {object} in the middle of it.",
    "In winter it is covered with snow.",
    "Many people come to the {place} when it is {weather}.",
    "A small river runs through it.",
    "At night the stars are bright above the {place}.",
    "The {job} lives there with {a_animal}.",
]


def slots(
    rng: Random, hero: str = "", name: str = "", place: str = "", thing: str = ""
) -> dict[str, str]:
    """A fresh set of story details; what is given is kept."""
    hero = hero or rng.choice([*world.ANIMALS, *world.ANIMALS, *world.HEROES])
    name = name or rng.choice(world.NAMES)
    place = place or rng.choice(world.PLACES)
    thing = thing or rng.choice(world.OBJECTS)
    adj, weather, fruit = (
        rng.choice(world.ADJECTIVES),
        rng.choice(world.WEATHER),
        rng.choice(world.LISTS["fruits"]),
    )
    tree = rng.choice(["apple", "oak", "pine", "cherry"])
    return {
        "hero": hero,
        "a_hero": article(rng.choice(["little", "young", "clever", "kind"]) + " " + hero),
        "name": name,
        "place": place,
        "a_place": article(place),
        "near": rng.choice(["near", "beside", "not far from"]),
        "place2": rng.choice([p for p in world.PLACES if p != place]),
        "friend": rng.choice([n for n in world.NAMES if n != name]),
        "other": rng.choice([a for a in world.ANIMALS if a != hero]),
        "their": rng.choice(["his", "her"]),
        "object": thing,
        "an_adj": article(adj),
        "adj": adj,
        "weather": weather,
        "a_weather": article(weather),
        "weather2": rng.choice(world.WEATHER),
        "feeling": rng.choice(world.FEELINGS),
        "feeling2": rng.choice(world.FEELINGS),
        "job": rng.choice(world.JOBS),
        "job2": "old " + rng.choice(world.JOBS),
        "drink": rng.choice(["tea", "milk", "cocoa"]),
        "fruit": fruit,
        "a_fruit": article(fruit),
        "tree": tree,
        "a_tree": article(tree),
        "number": rng.choice(world.NUMBERS[2:10]),
    }


def story(rng: Random, hero: str = "", name: str = "", place: str = "", thing: str = "") -> str:
    """A story of seven to nine sentences in one or two paragraphs."""
    s = slots(rng, hero, name, place, thing)
    plot = rng.choice(_PLOTS)
    if thing and not any("{object}" in line for beat in plot for line in beat):
        plot = _PLOTS[0]
    lines = [rng.choice(_OPENINGS), rng.choice(_MORNINGS)]
    lines += [
        rng.choice([b for b in beat if not thing or "{object}" in b] or beat) for beat in plot
    ]
    lines.append(rng.choice(_ENDINGS))
    text = [line.format(**s) for line in lines]
    if rng.random() < 0.3:
        return " ".join(text[:2]) + "\n\n" + " ".join(text[2:])
    return " ".join(text)


def long_story(rng: Random, hero: str = "", name: str = "") -> str:
    """Three or four paragraphs, each with a plot of its own and the same hero."""
    first = slots(rng, hero, name)
    lines = [rng.choice(_OPENINGS).format(**first)]
    for i, plot in enumerate(rng.sample(_PLOTS, rng.randint(2, 3))):
        again = slots(rng, first["hero"], first["name"]) | {"place": first["place"]}
        start = rng.choice(_MORNINGS) if i == 0 else rng.choice(_NEXT_DAYS)
        if i:
            lines.append("\n\n")
        lines += [line.format(**again) for line in (start, *(rng.choice(beat) for beat in plot))]
        last = again
    lines += ["\n\n", rng.choice(_ENDINGS).format(**last)]
    return " ".join(lines).replace(" \n\n ", "\n\n")


def poem(rng: Random, topic: str) -> str:
    """Four lines about a topic."""
    values = {
        "t": topic,
        "a_t": article(topic),
        "adj": rng.choice(world.ADJECTIVES),
        "feeling": rng.choice(world.FEELINGS),
        "object": rng.choice(world.OBJECTS),
    }
    return "\n".join(line.format(**values) for line in rng.choice(_POEMS))


def letter(rng: Random, to: str) -> str:
    """A short letter to a person."""
    s = slots(rng)
    body = [
        f"How are you? I am {s['feeling']}.",
        f"Today it is {s['weather']} here.",
        f"Yesterday I went to the {s['place']} and saw {article(s['other'])}.",
        f"I have {s['an_adj']} {s['object']} for you.",
        f"Please come and visit me in the {s['place2']} soon.",
    ]
    keep = sorted(rng.sample(range(5), rng.randint(3, 4)))
    return f"Dear {to},\n\n" + " ".join(body[i] for i in keep) + f"\n\nYour friend,\n{s['friend']}"


def description(rng: Random, place: str) -> str:
    """Three or four sentences about a place."""
    s = slots(rng, place=place) | {
        "animals": rng.choice(["birds", "bees", "frogs", "owls"]),
        "a_animal": article(rng.choice(list(world.ANIMALS))),
    }
    keep = [0, *sorted(rng.sample(range(1, len(_PLACE_SENTENCES)), rng.randint(2, 3)))]
    return " ".join(_PLACE_SENTENCES[i].format(**s) for i in keep)


def portrait(rng: Random, animal: str) -> str:
    """What the world knows about an animal."""
    sound, young, home, food, trait = world.ANIMALS[animal]
    name = article(animal).capitalize()
    lines = [
        f"It lives in {home}.".replace("in a hill", "on a hill")
        .replace("in a farm", "on a farm")
        .replace("in the savanna", "on the savanna"),
        f"It likes to eat {food}.",
        f'It says "{sound}".',
        f"A young {animal} is called {article(young)}.",
    ]
    rng.shuffle(lines)
    return f"{name} is {trait}. " + " ".join(lines[: rng.randint(2, 4)])
