"""Families in which amounts of several people or containers are combined."""

from __future__ import annotations

from .sheet import Draw, Sheet
from .stories import JOINS, change, how_many_left, reference
from .words import CONTAINERS, PLACES, TOTALS, Person


def compare(draw: Draw, sheet: Sheet) -> tuple[str, int]:
    """Make a problem that compares two amounts.

    `Ava has 12 apples. Ben has 5 more than Ava. How many apples do they have together?`
    """
    people = draw.people(3 if draw.chance(0.25) else 2)
    thing = draw.thing()
    noun = thing.split()[-1]
    have = draw.pick(["has", "has", "has", "had", "collects", "owns"])
    amounts = [draw.number()]
    text = f"{people[0].name} {have} {amounts[0]} {thing}."
    for index in range(1, len(people)):
        known = draw.rng.randrange(index)
        relation, amount = _related(draw, sheet, amounts[known], thing, people[known], index > 1 or draw.chance(0.8))
        text += f" {people[index].name} {have} {relation}."
        amounts.append(amount)
    if draw.chance(0.25):
        return f"{text} How many {noun} does {people[-1].name} have?", amounts[-1]
    total = amounts[0]
    for amount in amounts[1:]:
        total = sheet.add(total, amount)
    both = f"{people[0].name} and {people[1].name}" if len(people) == 2 else "they"
    text += " " + draw.pick(
        [
            f"How many {noun} do they have {draw.pick(TOTALS)}?",
            f"How many {noun} do {both} have {draw.pick(TOTALS)}?",
            f"How many {thing} are there {draw.pick(TOTALS)}?",
            f"How many do they have {draw.pick(TOTALS)}?",
            f"What is the total number of {noun}?",
        ]
    )
    return text, total


def _related(draw: Draw, sheet: Sheet, known: int, thing: str, person: Person, name_other: bool) -> tuple[str, int]:
    """Return an amount in words relative to a person's, and its value. A multiple may leave the person unnamed."""
    kind = draw.rng.choices(["more", "fewer", "times"], [4, 4, 3])[0]
    noun = draw.pick([f" {thing}", "", "", f" {thing.split()[-1]}"])
    if kind == "more":
        amount = draw.number()
        return f"{amount} more{noun} than {person.name}", sheet.add(known, amount)
    if kind == "fewer":
        amount = draw.at_most(known)
        return f"{amount} {draw.pick(['fewer', 'fewer', 'less'])}{noun} than {person.name}", sheet.subtract(
            known, amount
        )
    factor = draw.factor()
    often = f"{factor} times" if factor > 2 or draw.chance(0.3) else "twice"
    than = f" as {person.name}" if name_other else ""
    return f"{often} as many{noun}{than}", sheet.multiply(known, factor)


def transfer(draw: Draw, sheet: Sheet) -> tuple[str, int]:
    """Make a problem in which one person gives to another.

    `Ava has 20 apples and Ben has 12. Ava gives Ben 5. How many apples does Ben have now?`
    """
    giver, taker = draw.people(2)
    thing = draw.thing()
    first, second = draw.number(), draw.number()
    amount = draw.at_most(first)
    text = draw.pick(
        [
            f"{giver.name} has {first} {thing} and {taker.name} has {second}.",
            f"{giver.name} has {first} {thing}. {taker.name} has {second} {thing}.",
            f"{taker.name} has {second} {thing} and {giver.name} has {first} {thing}.",
        ]
    )
    text += " " + draw.pick(
        [
            f"{giver.name} gives {taker.name} {amount} {thing}.",
            f"{giver.name} gives {amount} of {giver.possessive} {thing} to {taker.name}.",
            f"{giver.name} gives {amount} to {taker.name}.",
            f"{taker.name} gets {amount} {thing} from {giver.name}.",
        ]
    )
    person = draw.pick([giver, taker])
    total = sheet.subtract(first, amount) if person is giver else sheet.add(second, amount)
    if draw.chance(0.6):
        if draw.chance(0.5):
            more = draw.number()
            text += f" Then {person.name} {draw.pick(['buys', 'finds', 'gets'])} {more} more."
            total = sheet.add(total, more)
        else:
            less = draw.at_most(total)
            text += f" Then {person.name} {draw.pick(['loses', 'sells', 'gives away'])} {less}."
            total = sheet.subtract(total, less)
    noun = thing.split()[-1]
    return text + " " + draw.pick(
        [
            f"How many {noun} does {person.name} have now?",
            f"How many does {person.name} have?",
            f"How many {noun} does {person.name} have in the end?",
        ]
    ), total


def boxes(draw: Draw, sheet: Sheet) -> tuple[str, int]:
    """Make a problem about things in containers.

    `Tom has 4 boxes of 12 eggs. He sells 7 eggs. How many eggs does he have left?`
    """
    person, thing = draw.person(), draw.thing()
    one, many = draw.pick(CONTAINERS)
    count, each = draw.factor(), draw.multiplicand()
    total = sheet.multiply(count, each)
    have = draw.pick(["has", "has", "buys", "fills", "brings", "packs"])
    noun = thing.split()[-1]
    text = draw.pick(
        [
            f"{person.name} {have} {count} {many} of {each} {thing}.",
            f"{person.name} {have} {count} {many} with {each} {thing} each.",
            f"{person.name} {have} {count} {many}. Each {one} has {each} {thing}.",
            f"There are {count} {many} with {each} {thing} in each {one}.",
            f"There are {count} {many} of {thing}. Each {one} holds {each} {thing}.",
            f"A {draw.pick(PLACES)} has {count} {many} with {each} {thing} in each.",
            f"{person.name} puts {each} {thing} in each of {count} {many}.",
            f"A {one} holds {each} {thing}. {person.name} {have} {count} {many}.",
            f"Each {one} {draw.pick(['holds', 'has', 'contains'])} {each} {thing}. "
            f"{person.name} {have} {count} {many}.",
            f"There are {each} {thing} in a {one}. {person.name} {have} {count} {many}.",
            f"{person.name} {have} {count} {many}. There are {each} {thing} in each {one}.",
        ]
    )
    steps = draw.rng.choices([0, 1, 2], [12, 63, 25])[0]
    for index in range(steps):
        joined = index == 0 and person.name in text.split(". ")[-1] and draw.chance(0.4)
        subject, plural = reference(draw, person)
        if joined or person.name not in text:
            subject, plural = person.name, False
        phrase, total = change(draw, sheet, total, person, noun, False, plural)
        text = f"{text[:-1]}{draw.pick(JOINS)} {phrase}." if joined else f"{text} {subject} {phrase}."
    if steps and person.name in text and draw.chance(0.6):
        return f"{text} {how_many_left(draw, person, thing, False)}", total
    return text + " " + draw.pick(
        [
            f"How many {noun} are left?" if steps else f"How many {noun} are there?",
            f"How many {noun} does {person.name} have{' now' if steps else ''}?",
            f"How many {noun} are there {draw.pick(TOTALS[:3])}?",
        ]
    ), total


def parts(draw: Draw, sheet: Sheet) -> tuple[str, int]:
    """Make a problem about parts of a whole.

    `There are 25 red and 13 blue marbles in a jar. 9 are taken out. How many marbles are left?`
    """
    thing = draw.thing().split()[-1]
    colors = draw.rng.sample(["red", "blue", "green", "yellow", "white", "black"], 3)
    place = draw.pick(["a jar", "a box", "a bag", "the garden", "a shop", "a basket", "the room"])
    amounts = [draw.number() for _ in range(3 if draw.chance(0.3) else 2)]
    listed = [f"{amount} {color} {thing}" for amount, color in zip(amounts, colors, strict=False)]
    if draw.chance(0.3):
        listed[0] = listed[0].rsplit(" ", 1)[0]
    joined = ", ".join(listed[:-1]) + " and " + listed[-1]
    person = draw.person()
    text = draw.pick(
        [f"There are {joined} in {place}.", f"{person.name} has {joined}.", f"{place.capitalize()} has {joined}."]
    )
    total = amounts[0]
    for amount in amounts[1:]:
        total = sheet.add(total, amount)
    if draw.chance(0.5):
        amount = draw.at_most(total)
        total = sheet.subtract(total, amount)
        text += " " + draw.pick(
            [
                f"{amount} are taken out.",
                f"{amount} of them are sold.",
                f"{person.name} takes {amount}.",
                f"{person.name} gives away {amount} of them.",
                f"{amount} {thing} are lost.",
            ]
        )
        return text + " " + draw.pick(
            [f"How many {thing} are left?", f"How many {thing} are there now?", "How many are left?"]
        ), total
    return text + " " + draw.pick(
        [
            f"How many {thing} are there {draw.pick(TOTALS[:3])}?",
            f"How many {thing} is that {draw.pick(TOTALS[:3])}?",
            f"What is the total number of {thing}?",
        ]
    ), total


def gather(draw: Draw, sheet: Sheet) -> tuple[str, int]:
    """Make a problem that adds the amounts of several people.

    `Ava has 3 apples, Ben has 4 and Tom has 6. How many apples do they have together?`
    """
    people = draw.people(3 if draw.chance(0.5) else 2)
    thing = draw.thing()
    noun = thing.split()[-1]
    verb, base = draw.pick(
        [
            ("has", "have"),
            ("has", "have"),
            ("has", "have"),
            ("finds", "find"),
            ("picks", "pick"),
            ("buys", "buy"),
            ("makes", "make"),
            ("brings", "bring"),
        ]
    )
    amounts = [draw.number() for _ in people]
    told = [
        f"{person.name} {verb} {amount}{f' {thing}' if index == 0 or draw.chance(0.4) else ''}"
        for index, (person, amount) in enumerate(zip(people, amounts, strict=True))
    ]
    text = draw.pick(
        [", ".join(told[:-1]) + " and " + told[-1], ". ".join(told), ", ".join(told[:-1]) + ", and " + told[-1]]
    )
    total = amounts[0]
    for amount in amounts[1:]:
        total = sheet.add(total, amount)
    if draw.chance(0.35):
        amount = draw.at_most(total)
        total = sheet.subtract(total, amount)
        text += ". " + draw.pick(
            [
                f"They give away {amount}",
                f"They lose {amount} {noun}",
                f"Together they eat {amount}",
                f"They sell {amount} of them",
            ]
        )
        return f"{text}. " + draw.pick(
            [f"How many {noun} are left?", f"How many {noun} do they have now?", "How many do they have left?"]
        ), total
    return f"{text}. " + draw.pick(
        [
            f"How many {noun} do they {base} {draw.pick(TOTALS)}?",
            f"How many {thing} do they {base} {draw.pick(TOTALS)}?",
            f"How many {noun} is that {draw.pick(TOTALS[:3])}?",
        ]
    ), total
