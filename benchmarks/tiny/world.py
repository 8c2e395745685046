"""The closed world of the corpus: names, places and facts; knows no chats and no tokens."""

from __future__ import annotations

from random import Random

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid",
    "Portugal": "Lisbon", "Greece": "Athens", "Austria": "Vienna", "Poland": "Warsaw",
    "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki", "Denmark": "Copenhagen",
    "Ireland": "Dublin", "England": "London", "Hungary": "Budapest", "Japan": "Tokyo",
    "China": "Beijing", "India": "New Delhi", "Egypt": "Cairo", "Kenya": "Nairobi",
    "Canada": "Ottawa", "Mexico": "Mexico City", "Brazil": "Brasilia", "Peru": "Lima",
    "Chile": "Santiago", "Cuba": "Havana", "Russia": "Moscow", "Turkey": "Ankara",
    "Iceland": "Reykjavik", "Belgium": "Brussels",
}  # fmt: skip
CITIES = [*CAPITALS.values(), "New York", "Sydney", "Boston", "Milan", "Hamburg", "Kyoto", "Geneva"]

#: kind: (sound, young, home, food, trait)
ANIMALS = {
    "cat": ("meow", "kitten", "a house", "fish", "soft and quiet"),
    "dog": ("woof", "puppy", "a house", "meat", "loyal and playful"),
    "cow": ("moo", "calf", "a farm", "grass", "calm and heavy"),
    "sheep": ("baa", "lamb", "a farm", "grass", "woolly and shy"),
    "horse": ("neigh", "foal", "a stable", "hay", "strong and fast"),
    "pig": ("oink", "piglet", "a farm", "corn", "clever and round"),
    "duck": ("quack", "duckling", "a pond", "seeds", "cheerful and wet"),
    "hen": ("cluck", "chick", "a farm", "seeds", "busy and proud"),
    "owl": ("hoot", "owlet", "a tree", "mice", "wise and silent"),
    "frog": ("croak", "tadpole", "a pond", "flies", "green and jumpy"),
    "lion": ("roar", "cub", "the savanna", "meat", "proud and golden"),
    "bear": ("growl", "cub", "a forest", "honey", "big and sleepy"),
    "fox": ("yelp", "kit", "a forest", "berries", "clever and red"),
    "mouse": ("squeak", "pup", "a barn", "cheese", "tiny and brave"),
    "bee": ("buzz", "larva", "a hive", "nectar", "busy and striped"),
    "wolf": ("howl", "pup", "a forest", "meat", "grey and watchful"),
    "rabbit": ("squeak", "kit", "a burrow", "carrots", "quick and gentle"),
    "goat": ("bleat", "kid", "a hill", "grass", "stubborn and curious"),
}
LEGS = {
    "spider": "eight", "bee": "six", "ant": "six", "snake": "no", "hen": "two", "duck": "two",
    "dog": "four", "cat": "four", "horse": "four", "cow": "four", "frog": "four", "owl": "two",
}  # fmt: skip
COLOURS_OF = {
    "the sky": "blue", "grass": "green", "snow": "white", "coal": "black", "a lemon": "yellow",
    "a tomato": "red", "a banana": "yellow", "blood": "red", "milk": "white", "a carrot": "orange",
    "the sun": "yellow", "an elephant": "grey", "a leaf": "green", "chocolate": "brown",
    "a strawberry": "red", "a plum": "purple", "a flamingo": "pink", "the sea": "blue",
}  # fmt: skip
OPPOSITES = [
    ("hot", "cold"), ("big", "small"), ("tall", "short"), ("fast", "slow"), ("day", "night"),
    ("up", "down"), ("left", "right"), ("happy", "sad"), ("old", "young"), ("light", "dark"),
    ("open", "closed"), ("full", "empty"), ("rich", "poor"), ("hard", "soft"), ("wet", "dry"),
    ("early", "late"), ("loud", "quiet"), ("near", "far"), ("clean", "dirty"), ("strong", "weak"),
    ("long", "brief"), ("good", "bad"), ("first", "last"), ("true", "false"), ("high", "low"),
    ("inside", "outside"), ("begin", "end"), ("buy", "sell"), ("love", "hate"), ("win", "lose"),
]  # fmt: skip
FRENCH = {
    "hello": "bonjour", "goodbye": "au revoir", "cat": "chat", "dog": "chien", "house": "maison",
    "water": "eau", "bread": "pain", "milk": "lait", "red": "rouge", "blue": "bleu",
    "friend": "ami", "sun": "soleil", "moon": "lune", "tree": "arbre", "book": "livre",
    "thank you": "merci", "yes": "oui", "no": "non", "one": "un", "two": "deux", "three": "trois",
    "night": "nuit",
}  # fmt: skip
CONTINENTS = {
    "France": "Europe", "Germany": "Europe", "Italy": "Europe", "Spain": "Europe",
    "Greece": "Europe", "Japan": "Asia", "China": "Asia", "India": "Asia", "Egypt": "Africa",
    "Kenya": "Africa", "Canada": "North America", "Mexico": "North America",
    "Brazil": "South America", "Peru": "South America", "Chile": "South America",
    "Norway": "Europe",
}  # fmt: skip
#: Questions with one answer each.
FACTS = [
    ("How many days are in a week?", "There are seven days in a week."),
    ("How many months are in a year?", "There are twelve months in a year."),
    ("How many hours are in a day?", "There are 24 hours in a day."),
    ("How many minutes are in an hour?", "There are 60 minutes in an hour."),
    ("How many seconds are in a minute?", "There are 60 seconds in a minute."),
    ("How many days are in a year?", "There are 365 days in a year, and 366 in a leap year."),
    (
        "How many letters are in the English alphabet?",
        "There are 26 letters in the English alphabet.",
    ),
    ("How many sides does a triangle have?", "A triangle has three sides."),
    ("How many sides does a square have?", "A square has four sides."),
    ("How many wheels does a bicycle have?", "A bicycle has two wheels."),
    ("How many continents are there?", "There are seven continents."),
    ("What is the largest planet?", "The largest planet in the solar system is Jupiter."),
    ("Which planet is closest to the sun?", "Mercury is the planet closest to the sun."),
    ("What planet do we live on?", "We live on the planet Earth."),
    ("Is the sun a star?", "Yes, the sun is a star."),
    ("What is the largest ocean?", "The largest ocean is the Pacific Ocean."),
    ("What is the longest river in Africa?", "The longest river in Africa is the Nile."),
    ("What is the highest mountain?", "The highest mountain on Earth is Mount Everest."),
    ("What is the fastest land animal?", "The fastest land animal is the cheetah."),
    ("What is the largest animal?", "The largest animal is the blue whale."),
    ("At what temperature does water freeze?", "Water freezes at 0 degrees Celsius."),
    ("At what temperature does water boil?", "Water boils at 100 degrees Celsius."),
    ("What is ice made of?", "Ice is made of frozen water."),
    ("What do bees make?", "Bees make honey."),
    ("What do plants need to grow?", "Plants need light, water and air to grow."),
    ("Where does the sun rise?", "The sun rises in the east."),
    ("Where does the sun set?", "The sun sets in the west."),
    ("What do you call frozen rain?", "Frozen rain is called hail."),
    ("Who wrote Hamlet?", "Hamlet was written by William Shakespeare."),
    ("Who painted the Mona Lisa?", "The Mona Lisa was painted by Leonardo da Vinci."),
    ("What colours make green?", "Blue and yellow make green."),
    ("What colours make orange?", "Red and yellow make orange."),
    ("What colours make purple?", "Red and blue make purple."),
    ("What is the first month of the year?", "The first month of the year is January."),
    ("What is the last month of the year?", "The last month of the year is December."),
    ("What are the four seasons?", "The four seasons are spring, summer, autumn and winter."),
    ("What do we use to see?", "We use our eyes to see."),
    ("What do we use to hear?", "We use our ears to hear."),
    ("What is the freezing point of water?", "The freezing point of water is 0 degrees Celsius."),
    ("What is the moon?", "The moon is a ball of rock that travels around the Earth."),
    (
        "What is a rainbow?",
        "A rainbow is an arc of colours that appears when the sun shines through rain.",
    ),
    ("What is the opposite of north?", "The opposite of north is south."),
    ("What is the opposite of east?", "The opposite of east is west."),
]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = [
    "January", "February", "March", "April", "May", "June", "July", "August", "September",
    "October", "November", "December",
]  # fmt: skip
NUMBERS = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
    "twenty",
]  # fmt: skip
LISTS = {
    "fruits": [
        "apple",
        "banana",
        "cherry",
        "grape",
        "lemon",
        "orange",
        "peach",
        "pear",
        "plum",
        "melon",
    ],
    "vegetables": ["carrot", "potato", "onion", "cabbage", "pea", "bean", "leek", "spinach"],
    "colours": ["red", "blue", "green", "yellow", "orange", "purple", "white", "black", "brown"],
    "animals": ["cat", "dog", "horse", "cow", "sheep", "lion", "bear", "fox", "owl", "frog"],
    "birds": ["owl", "robin", "eagle", "swan", "duck", "crow", "sparrow", "parrot"],
    "cities": ["Paris", "Rome", "London", "Berlin", "Madrid", "Tokyo", "Cairo", "Oslo"],
    "countries": ["France", "Italy", "Japan", "Brazil", "Canada", "Egypt", "India", "Spain"],
    "planets": ["Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune"],
    "tools": ["hammer", "saw", "drill", "wrench", "ladder", "rope"],
    "drinks": ["water", "milk", "tea", "coffee", "juice", "cocoa"],
}
#: Heroes of stories that are no animals of the tables above.
HEROES = [
    "dragon", "robot", "princess", "knight", "wizard", "boy", "girl", "whale", "turtle", "giant",
    "pirate", "king", "queen", "hedgehog", "squirrel", "penguin", "elephant", "tiger", "snail",
    "butterfly",
]  # fmt: skip
NAMES = [
    "Mia", "Tom", "Anna", "Ben", "Lily", "Max", "Nora", "Sam", "Ella", "Leo", "Ruby", "Finn",
    "Clara", "Oscar", "Ivy", "Hugo", "Emma", "Jack", "Zoe", "Alice", "Bob", "Peter", "Sara", "Paul",
]  # fmt: skip
PLACES = [
    "forest",
    "village",
    "harbour",
    "garden",
    "valley",
    "meadow",
    "market",
    "castle",
    "island",
    "mill",
]
OBJECTS = [
    "lantern",
    "key",
    "map",
    "kite",
    "basket",
    "bell",
    "boat",
    "book",
    "drum",
    "coin",
    "blanket",
    "cup",
]
ADJECTIVES = ["old", "small", "shiny", "red", "blue", "wooden", "golden", "broken"]
FEELINGS = ["happy", "proud", "calm", "brave", "glad", "curious"]
WEATHER = ["sunny", "rainy", "windy", "cloudy", "snowy", "foggy"]
JOBS = ["baker", "teacher", "farmer", "sailor", "painter", "doctor", "gardener", "pilot"]
TOPICS = [
    "history of Rome", "good bread recipes", "how rockets work", "best chess openings",
    "news about space", "how to grow tomatoes", "famous painters", "trains to Vienna",
    "rules of football", "jazz music", "the blue whale", "cheap flights to Oslo",
    "learning to swim", "old maps", "solar energy",
]  # fmt: skip
#: Plain words for echo and recall tasks.
WORDS = sorted({
    *OBJECTS, *PLACES, *ADJECTIVES, *FEELINGS, *FRENCH, *ANIMALS, *JOBS,
    *(w for ws in LISTS.values() for w in ws), "sing", "walk", "under", "over", "stone", "cloud",
    "river", "song", "dream", "window", "seven", "silver", "hello", "world", "again",
})  # fmt: skip
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def made_up(rng: Random, capital: bool = True) -> str:
    """A name that is nobody's, so that names are also copied and not only remembered."""
    name = "".join(
        rng.choice(
            ["b", "d", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "t", "v", "w", "br", "st"]
        )
        + rng.choice(["a", "e", "i", "o", "u", "an", "er", "on", "il"])
        for _ in range(rng.randint(1, 3))
    )
    return name.capitalize() if capital else name


def article(noun: str) -> str:
    """The noun with "a" or "an" before it."""
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"
