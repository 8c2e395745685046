"""Questions with free answers: lists, JSON, greetings, echo, recall and requests for prose."""

from __future__ import annotations

import json
from random import Random

from benchmarks.tiny import stories, world
from benchmarks.tiny.facts import Exchange
from benchmarks.tiny.world import article


def listing(rng: Random) -> Exchange:
    """Counting, the alphabet, days and months, and lists of things."""
    kind = rng.choice(
        [
            "count",
            "count",
            "down",
            "even",
            "alphabet",
            "days",
            "months",
            "things",
            "things",
            "things",
        ]
    )
    if kind == "count":
        n = rng.choice([3, 5, 5, 8, 10, 10, 10, 12, 15, 20])
        word = world.NUMBERS[n] if rng.random() < 0.4 else str(n)
        ask = rng.choice(
            [
                f"Count to {word}.",
                f"Count from 1 to {n}.",
                f"Please count from one to {word}.",
                f"List the numbers from 1 to {n}.",
            ]
        )
        answer = ", ".join(map(str, range(1, n + 1))) + "."
    elif kind == "down":
        n = rng.choice([3, 5, 10])
        ask, answer = f"Count down from {n}.", ", ".join(map(str, range(n, 0, -1))) + "."
    elif kind == "even":
        ask, answer = "List the even numbers up to ten.", "2, 4, 6, 8, 10."
    elif kind == "alphabet":
        ask = rng.choice(
            [
                "Say the alphabet.",
                "Recite the English alphabet.",
                "List the letters of the alphabet.",
                "What is the alphabet?",
            ]
        )
        answer = " ".join(world.ALPHABET)
    elif kind == "days":
        ask = rng.choice(["List the days of the week.", "What are the days of the week?"])
        answer = "The days of the week are " + ", ".join(world.DAYS[:-1]) + " and Sunday."
    elif kind == "months":
        ask = rng.choice(
            ["List the months of the year.", "Name all months.", "What are the months of the year?"]
        )
        answer = "The months of the year are " + ", ".join(world.MONTHS[:-1]) + " and December."
    else:
        topic = rng.choice(list(world.LISTS))
        n = rng.randint(2, 5)
        word = world.NUMBERS[n] if rng.random() < 0.7 else str(n)
        items = world.LISTS[topic][: n + 2]
        if rng.random() < 0.5:
            items = rng.sample(items, n)
        items = items[:n]
        ask = rng.choice(
            [
                f"List {word} {topic}.",
                f"Name {word} {topic}.",
                f"Give me a list of {word} {topic}.",
                f"Tell me {word} {topic}.",
            ]
        )
        if "list" in ask.lower():
            answer = "\n".join(f"{i}. {x}" for i, x in enumerate(items, 1))
        else:
            answer = (
                f"{word.capitalize()} {topic} are " + ", ".join(items[:-1]) + f" and {items[-1]}."
            )
    return Exchange(ask, answer, "The user wants a list. I will write it in order.")


def json_object(rng: Random) -> Exchange:
    """A JSON object or array with values given by the user or taken from the world."""
    name, age = rng.choice(world.NAMES), rng.randint(2, 99)
    city, job = rng.choice(world.CITIES), rng.choice(world.JOBS)
    country = rng.choice(list(world.CAPITALS))
    fruit, n = rng.choice(world.LISTS["fruits"]), rng.randint(1, 9)
    thing, colour = rng.choice(list(world.COLOURS_OF.items()))
    topic = rng.choice(["fruits", "colours", "animals", "cities"])
    items = rng.sample(world.LISTS[topic], 3)
    lead = rng.choice(
        [
            "Give me a JSON object with",
            "Write a JSON object with",
            "Return JSON with",
            "Make a JSON object with",
        ]
    )
    ask, value = rng.choice(
        [
            (f"{lead} the name {name} and the age {age}.", {"name": name, "age": age}),
            (
                f"{lead} name {name}, age {age} and city {city}.",
                {"name": name, "age": age, "city": city},
            ),
            (f"{lead} name {name} and job {job}.", {"name": name, "job": job}),
            (
                f"{lead} the country {country} and its capital.",
                {"country": country, "capital": world.CAPITALS[country]},
            ),
            (f"{lead} {n} of the fruit {fruit}.", {"fruit": fruit, "count": n}),
            (f"{lead} the colour of {thing}.", {"thing": thing, "colour": colour}),
            (f"{lead} the {topic} {items[0]}, {items[1]} and {items[2]}.", {topic: items}),
            (f"{lead} a person.", {"name": name, "age": age, "city": city}),
        ]
    )
    return Exchange(
        ask, json.dumps(value), "The user wants JSON. I will write only the JSON object."
    )


def echo(rng: Random) -> Exchange:
    """Repeat words exactly."""
    pool = world.WORDS + world.NAMES + world.CITIES
    longest = rng.choice([4, 8, 16])
    words = [rng.choice(pool) for _ in range(rng.randint(1, longest))]
    if rng.random() < 0.3:
        words[rng.randrange(len(words))] = world.made_up(rng, capital=rng.random() < 0.5)
    if rng.random() < 0.3:
        words.insert(rng.randint(0, len(words)), str(rng.randint(0, 999)))
    text = " ".join(words)
    if rng.random() < 0.4:
        text = text.capitalize() + rng.choice([".", "!"])
    ask = rng.choice(
        [
            f"Repeat after me: {text}",
            f"Say: {text}",
            f"Say {text}",
            f"Repeat this: {text}",
            f"Echo: {text}",
        ]
    )
    return Exchange(ask, text, "The user wants me to repeat the words.")


_SMALL_TALK = {
    ("Hello!", "Hi!", "Hello", "Hi", "Hey", "Hi there!", "Good morning!", "Hello there."): [
        "Hello! How can I help you today?",
        "Hi! How can I help you?",
    ],
    (
        "Who are you?",
        "What are you?",
        "What is your name?",
        "Introduce yourself.",
        "Tell me about yourself.",
    ): ["I am Spark Tiny, a very small language model that comes with Spark."],
    ("Who made you?", "Where do you come from?", "How were you trained?"): [
        "I was trained by a script in the Spark project, on text that the script makes up."
    ],
    ("What can you do?", "How can you help me?", "Help"): [
        "I can tell short stories, answer simple questions, do small sums, "
        "write lists and JSON, and call tools."
    ],
    ("How are you?", "How are you today?", "How do you do?"): [
        "I am fine, thank you! How can I help you?"
    ],
    ("Thank you!", "Thanks!", "Thank you very much.", "Thanks a lot"): [
        "You are welcome!",
        "You are welcome! Is there anything else?",
    ],
    ("Say hello.", "Say hello", "Say hi.", "Say hello!", "Greet me."): ["Hello!"],
    ("Ok", "OK.", "Good.", "Great!", "I see.", "Nice!"): ["Is there anything else?"],
    ("Yes", "Yes, please.", "No", "No, thanks."): ["All right. How can I help you?"],
    ("Goodbye!", "Bye!", "Good night!", "See you later."): ["Goodbye! Have a nice day."],
    ("Are you human?", "Are you a robot?", "Are you a person?"): [
        "No, I am a computer program. I am Spark Tiny, a very small language model."
    ],
    ("Tell me a joke.", "Do you know a joke?", "Make me laugh."): [
        "Why did the hen cross the road? To get to the other side!",
        "What do you call a bear with no teeth? A gummy bear!",
        "Why was six afraid of seven? Because seven ate nine!",
    ],
    ("How big are you?", "How many parameters do you have?"): [
        "I have about four million parameters, so I am very small."
    ],
    ("Test", "test", "ping", "Are you there?", "This is a test."): [
        "I am here. How can I help you?"
    ],
    ("How do I make tea?", "How do you make tea?", "Tell me how to make tea."): [
        "1. Boil some water.\n2. Put a tea bag into a cup.\n3. Pour the hot water into the cup.\n"
        "4. Wait three minutes and take out the tea bag."
    ],
    ("How do I bake bread?", "How do you make bread?"): [
        "1. Mix flour, water, salt and yeast.\n2. Knead the dough.\n3. Let it rest for an hour.\n"
        "4. Bake it until it is golden."
    ],
    ("What should I do on a rainy day?", "What can I do today?", "I am bored."): [
        "You could read a book, bake a cake or draw a picture."
    ],
}


def small_talk(rng: Random) -> Exchange:
    """Greetings, questions about the model, jokes."""
    asks, answers = rng.choice(list(_SMALL_TALK.items()))
    return Exchange(
        rng.choice(asks), rng.choice(answers), "The user is talking to me. I will answer kindly."
    )


def unknown(rng: Random) -> Exchange:
    """A question outside the world gets an honest answer."""
    nonsense = "".join(
        rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(2, 3))
    )
    topic = rng.choice([rng.choice(world.TOPICS), nonsense, nonsense.capitalize()])
    ask = rng.choice(
        [
            f"What is {topic}?",
            f"Tell me about {topic}.",
            f"Explain {topic}.",
            f"Who invented {topic}?",
            f"Why is {topic} important?",
        ]
    )
    return Exchange(
        ask,
        f"I am sorry, I do not know about {topic}. I am a very small model.",
        f"The user asks about {topic}. I do not know that.",
    )


def recall(rng: Random) -> list[Exchange]:
    """Two exchanges, the second of which needs the first."""
    name, n, thing = (
        rng.choice(world.NAMES),
        rng.randint(1, 99),
        rng.choice(world.LISTS[rng.choice(["colours", "animals", "fruits"])]),
    )
    kind = rng.choice(["name", "number", "favourite"])
    if kind == "name":
        return [
            Exchange(
                rng.choice(
                    [f"My name is {name}.", f"Hello, I am {name}.", f"Hi, my name is {name}!"]
                ),
                f"Hello {name}! How can I help you?",
                f"The user is called {name}.",
            ),
            Exchange(
                rng.choice(["What is my name?", "Do you remember my name?", "Who am I?"]),
                f"Your name is {name}.",
                f"The user said that the name is {name}.",
            ),
        ]
    if kind == "number":
        return [
            Exchange(
                f"Remember the number {n}.",
                f"I will remember the number {n}.",
                f"The number is {n}.",
            ),
            Exchange(
                rng.choice(["What was the number?", "Which number did I tell you?"]),
                f"The number was {n}.",
                f"The user told me the number {n}.",
            ),
        ]
    return [
        Exchange(
            f"My favourite word is {thing}.",
            f"That is a nice word: {thing}.",
            f"The word is {thing}.",
        ),
        Exchange(
            "What is my favourite word?",
            f"Your favourite word is {thing}.",
            f"The user likes {thing}.",
        ),
    ]


def prose(rng: Random) -> Exchange:
    """A request for a story, a poem, a letter or a description, with the text."""
    kind = rng.choice(["story"] * 6 + ["long", "poem", "letter", "place", "animal", "animal"])
    hero, name, place = (
        rng.choice(list(world.ANIMALS)),
        rng.choice(world.NAMES),
        rng.choice(world.PLACES),
    )
    if kind == "story" and rng.random() < 0.4:
        hero = rng.choice(world.HEROES)
    if rng.random() < 0.1:
        name = world.made_up(rng)
    thing = rng.choice(world.OBJECTS)
    think = "The user wants a text. I will write it."
    please = rng.choice(["Tell me", "Write", "Please tell me", "Write me"])
    if kind == "long":
        ask, given = rng.choice(
            [
                (f"{please} a long story.", {}),
                (f"{please} a long story about {article(hero)}.", {"hero": hero}),
                (f"{please} a long story about {name}.", {"name": name}),
            ]
        )
        return Exchange(ask, stories.long_story(rng, **given), think)
    short = rng.choice(["a story", "a short story", "a little story"])
    if kind == "poem":
        topic = rng.choice([hero, place, thing, "moon", "sun", "sea", "tree"])
        return Exchange(
            rng.choice(
                [f"Write a poem about the {topic}.", f"Write a short poem about {article(topic)}."]
            ),
            stories.poem(rng, topic),
            think,
        )
    if kind == "letter":
        return Exchange(f"Write a letter to {name}.", stories.letter(rng, name), think)
    if kind == "place":
        return Exchange(
            rng.choice([f"Describe the {place}.", f"What is the {place} like?"]),
            stories.description(rng, place),
            think,
        )
    if kind == "animal":
        return Exchange(
            rng.choice(
                [
                    f"Tell me about the {hero}.",
                    f"Describe {article(hero)}.",
                    f"What is {article(hero)}?",
                ]
            ),
            stories.portrait(rng, hero),
            think,
        )
    ask, given = rng.choice(
        [
            (f"{please} {short}.", {}),
            (f"{please} {short} about {article(hero)}.", {"hero": hero}),
            (f"{please} {short} about {article(hero)} named {name}.", {"hero": hero, "name": name}),
            (f"{please} {short} about {article(thing)}.", {"thing": thing}),
            (f"{please} {short} in {article(place)}.", {"place": place}),
            (
                f"{please} {short} about {article(hero)} in {article(place)}.",
                {"hero": hero, "place": place},
            ),
            (f"{please} {short} about {name}.", {"name": name}),
            (
                f"{please} {short} about {article(hero)} and {article(thing)}.",
                {"hero": hero, "thing": thing},
            ),
        ]
    )
    return Exchange(ask, stories.story(rng, **given), think)
