"""Words of the problems: people, things, places, and invented ones.

Common words become whole entries of the tokenizer; rare and invented ones are spelled in bytes, so that the model meets
words it has no entry for.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


def _words(text: str) -> list[str]:
    return text.split()


WOMEN = _words(
    """
    Ava Mia Lily Emma Sara Nina Julia Grace Hannah Ella Zoe Maya Chloe Anna Ruth Olivia Sophia Alice
    Emily Lucy Clara Maria Jane Rosa
    """
)
MEN = _words(
    """
    Ben Tom Leo Max Noah Liam Jack Omar Ivan Paul Oscar Hugo David Sam Lucas Ethan Adam Peter John
    Daniel Carlos James Henry Mark
    """
)
ANYONE = _words("Alex Robin Kim Jordan Taylor Casey Morgan Riley Sasha Charlie")
RARE_NAMES = _words(
    """
    Priya Wei Aisha Bjorn Xavier Fatima Kenji Ingrid Tariq Yuki Abigail Benjamin Charlotte Dmitri
    Eleanor Fiona Gustav Hiroshi Isabella Jasmine Kofi Leila Mateo Natalia Oluwaseun Penelope Quentin
    Rosalind Sebastian Theodore Ursula Valentina Wolfgang Yolanda Zachary Bob Tim Amy Eve Jim Sue Ian
    Joe Kate Lena Nora Owen
    """
)

THINGS = _words(
    """
    apples pears oranges lemons plums peaches bananas cherries grapes carrots potatoes tomatoes eggs
    cookies cakes candies sweets muffins sandwiches books pens pencils notebooks stickers stamps cards
    coins marbles balls toys dolls balloons shells stones flowers roses tulips seeds trees leaves
    buttons beads ribbons boxes bottles cups plates hats shirts socks shoes tickets postcards photos
    magazines keys bricks nails tiles
    """
)
RARE_THINGS = _words(
    """
    mangoes kiwis walnuts almonds donuts pancakes bagels pizzas burgers strawberries blueberries
    pumpkins onions mushrooms peanuts chocolates lollipops crayons erasers rulers backpacks bracelets
    necklaces rings gloves scarves jackets kittens puppies rabbits fish birds butterflies feathers
    acorns pinecones rocks crystals gems medals trophies puzzles robots rockets dinosaurs trains
    bicycles skateboards guitars drums lamps candles mugs spoons forks bowls vases pillows blankets
    envelopes letters posters paintings batteries screws ropes
    """
)
ADJECTIVES = _words("red blue green big small old new fresh toy glass wooden shiny")
CONTAINERS = [
    ("box", "boxes"),
    ("bag", "bags"),
    ("basket", "baskets"),
    ("jar", "jars"),
    ("packet", "packets"),
    ("crate", "crates"),
    ("shelf", "shelves"),
    ("tray", "trays"),
    ("bucket", "buckets"),
    ("row", "rows"),
    ("pack", "packs"),
    ("table", "tables"),
]
PLACES = _words("shop store school farm garden library kitchen market room warehouse bakery park")
TOTALS = ["in total", "altogether", "in all", "together"]
ROLES = _words("farmer baker teacher gardener painter cook girl boy man woman child student clerk doctor driver")
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")


@dataclass(frozen=True)
class Person:
    """A person in a problem, named as inside a sentence. `plural`: the pronoun takes plain verbs."""

    name: str
    pronoun: str
    object: str
    possessive: str

    @property
    def plural(self) -> bool:
        return self.pronoun in ("they", "I")

    @property
    def speaker(self) -> bool:
        """True for the person that asks, whose name takes plain verbs as well."""
        return self.name == "I"


PRONOUNS = [("she", "her", "her"), ("he", "him", "his"), ("they", "them", "their")]


def invented_word(rng: random.Random) -> str:
    """Return a pronounceable word that no vocabulary holds, of two or three syllables."""
    syllables = rng.randint(2, 3)
    parts = ["bcdfghjklmnprstvwz", "aeiou", ["", "", "l", "n", "r", "x"]]
    return "".join(rng.choice(part) for _ in range(syllables) for part in parts)


def draw_person(rng: random.Random, unseen: float) -> Person:
    """Draw a person; with probability `unseen` one whose name the tokenizer has no entry for."""
    if rng.random() < unseen:
        name = rng.choice(RARE_NAMES) if rng.random() < 0.6 else invented_word(rng).capitalize()
        return Person(name, *rng.choice(PRONOUNS))
    kind = rng.choices([0, 1, 2], [5, 5, 1])[0]
    name = rng.choice((WOMEN, MEN, ANYONE)[kind])
    return Person(name, *(PRONOUNS[kind] if rng.random() > 0.05 else PRONOUNS[2]))


def draw_subject(rng: random.Random, unseen: float) -> Person:
    """Draw a person as `draw_person`, but sometimes `I` or one without a name, such as `the farmer`."""
    roll = rng.random()
    if roll < 0.07:
        return Person("I", "I", "me", "my")
    if roll < 0.15:
        return Person(f"the {rng.choice(ROLES)}", *rng.choice(PRONOUNS[:2]))
    return draw_person(rng, unseen)


def capitalized(text: str) -> str:
    """Return the text with its first letter large and the others unchanged."""
    return text[0].upper() + text[1:]


def singular(thing: str) -> str:
    """Return one of a thing if dropping the last letter makes it; else the plural unchanged."""
    if not thing.endswith("s") or thing.endswith(("ies", "ves", "xes", "ches", "oes", "ses")):
        return thing
    return thing[:-1]


def draw_thing(rng: random.Random, unseen: float) -> str:
    """Draw a countable thing in the plural; with probability `unseen` a rare or an invented one."""
    if rng.random() < unseen:
        thing = rng.choice(RARE_THINGS) if rng.random() < 0.6 else invented_word(rng) + "s"
    else:
        thing = rng.choice(THINGS)
    return f"{rng.choice(ADJECTIVES)} {thing}" if rng.random() < 0.12 else thing
