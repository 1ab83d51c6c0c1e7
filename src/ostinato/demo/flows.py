"""Families in which a stock of money or a crowd grows and shrinks, and families day by day."""

from __future__ import annotations

from .sheet import Draw, Sheet
from .words import DAYS, TOTALS


def saving(draw: Draw, sheet: Sheet) -> tuple[str, int]:
    """Make a problem about savings.

    `Mia saves 12 dollars each week for 6 weeks. She spends 30. How much does she have left?`
    """
    person = draw.person()
    unit = draw.pick(["week", "day", "month"])
    verb = draw.pick(["saves", "earns"])
    do = "do" if person.plural else "does"
    text = ""
    total = 0
    if draw.chance(0.5):
        each, count = draw.multiplicand(), draw.factor()
        total = sheet.multiply(each, count)
        per = draw.pick(["each", "every", "per", "a"])
        text = f"{person.name} {verb} {each} dollars {per} {unit} for {count} {unit}s."
    else:
        total = draw.number()
        text = f"{person.name} {draw.pick(['has', 'had', 'saves', 'starts with'])} {total} dollars."
    for _ in range(draw.rng.randint(1, 2)):
        subject = draw.pick([person.pronoun.capitalize(), f"Then {person.pronoun}", person.name])
        plural = person.plural and subject != person.name
        if draw.chance(0.4):
            amount = draw.number()
            verb = draw.pick([("earns", "earn"), ("finds", "find"), ("gets", "get"), ("saves", "save")])[plural]
            text += f" {subject} {verb} {amount} {draw.pick(['dollars', 'more dollars', 'dollars more'])}."
            total = sheet.add(total, amount)
        else:
            amount = draw.at_most(total)
            verb = draw.pick([("spends", "spend"), ("pays", "pay"), ("loses", "lose")])[plural]
            reason = draw.pick(["", "", f" for {draw.thing()}"]) if verb != "loses" else ""
            text += f" {subject} {verb} {amount} dollars{reason}."
            total = sheet.subtract(total, amount)
    question = draw.pick(
        [
            f"How much money {do} {person.pronoun} have left?",
            f"How many dollars does {person.name} have now?",
            f"How many dollars {do} {person.pronoun} have left?",
            f"How much money does {person.name} have?",
            "How many dollars are left?",
            f"How much does {person.name} have now?",
            f"How much {do} {person.pronoun} have left?",
        ]
    )
    return f"{text} {question}", total


def riders(draw: Draw, sheet: Sheet) -> tuple[str, int]:
    """Make a problem about passengers that get on and off.

    `A bus has 20 people. 5 get off and 8 get on. How many people are on the bus now?`
    """
    place, people, come, go = draw.pick(
        [
            ("bus", "people", ("get on", "climb on"), ("get off", "leave")),
            ("train", "passengers", ("get on", "board"), ("get off", "leave")),
            ("room", "children", ("come in", "enter"), ("leave", "go out")),
            ("park", "dogs", ("arrive", "come"), ("leave", "run away")),
            ("pond", "ducks", ("arrive", "land"), ("leave", "fly away")),
            ("class", "students", ("join", "come in"), ("leave", "go home")),
            ("tree", "birds", ("arrive", "land"), ("leave", "fly away")),
            ("library", "visitors", ("come in", "enter"), ("leave", "go home")),
        ]
    )
    where = "on the" if place in ("bus", "train", "pond") else "in the"
    total = draw.number()
    text = draw.pick(
        [
            f"There are {total} {people} {where} {place}.",
            f"{total} {people} are {where} {place}.",
            f"A {place} has {total} {people}.",
            f"There were {total} {people} {where} {place}.",
        ]
    )
    steps = draw.rng.choices([1, 2, 3], [10, 60, 30])[0]
    phrases = []
    for _ in range(steps):
        if draw.chance(0.5):
            amount, verb = draw.number(), draw.pick(come)
            total = sheet.add(total, amount)
            more = draw.pick(["", " more", " more", f" more {people}"])
        else:
            amount, verb = draw.at_most(total), draw.pick(go)
            total = sheet.subtract(total, amount)
            more = draw.pick(["", "", f" {people}", " of them"])
        phrases.append(f"{amount}{more} {verb}")
    text += f" {phrases[0]}"
    for phrase in phrases[1:]:
        text += draw.pick([" and", ", and", " and then", ". Then", ".", ". After that,"]) + f" {phrase}"
    return f"{text}. " + draw.pick(
        [
            f"How many {people} are {where} {place} now?",
            f"How many {people} are left?",
            f"How many {people} are there now?",
            f"How many are {where} {place} now?",
        ]
    ), total


def week(draw: Draw, sheet: Sheet) -> tuple[str, int]:
    """Make a problem that adds the amounts of several days.

    `Leo reads 45 pages on Monday and 60 pages on Tuesday. How many pages does he read in total?`
    """
    person = draw.person()
    do = "do" if person.plural else "does"
    verb, base, thing = draw.pick(
        [
            ("reads", "read", "pages"),
            ("sells", "sell", draw.thing()),
            ("picks", "pick", draw.thing()),
            ("runs", "run", "miles"),
            ("makes", "make", draw.thing()),
            ("writes", "write", "words"),
            ("eats", "eat", draw.thing()),
            ("bakes", "bake", "cookies"),
            ("walks", "walk", "miles"),
        ]
    )
    noun = thing.split()[-1]
    names = draw.rng.sample(DAYS, 3)
    amounts = [draw.number()]
    parts_told = [f"{amounts[0]} {thing} on {names[0]}"]
    for index in range(1, 3 if draw.chance(0.35) else 2):
        kind = draw.rng.choices(["plain", "more", "times"], [5, 2, 2])[0]
        told = f" {noun}" if draw.chance(0.5) else ""
        if kind == "plain":
            amounts.append(draw.number())
            parts_told.append(f"{amounts[-1]}{told} on {names[index]}")
        elif kind == "more":
            more = draw.number()
            amounts.append(sheet.add(amounts[-1], more))
            parts_told.append(f"{more} more{told} on {names[index]} than on {names[index - 1]}")
        else:
            factor = draw.factor()
            often = f"{factor} times" if factor > 2 else "twice"
            amounts.append(sheet.multiply(amounts[-1], factor))
            parts_told.append(f"{often} as many on {names[index]}")
    total = amounts[0]
    for amount in amounts[1:]:
        total = sheet.add(total, amount)
    text = (
        f"{person.name} {verb} " + (", ".join(parts_told[:-1]) + draw.pick([" and ", ", and "]) + parts_told[-1]) + "."
    )
    if noun == "pages" and draw.chance(0.5):
        whole = total + draw.number()
        left = sheet.subtract(whole, total)
        return f"A book has {whole} pages. {text} How many pages are left?", left
    return text + " " + draw.pick(
        [
            f"How many {noun} {do} {person.pronoun} {base} {draw.pick(TOTALS[:3])}?",
            f"How many {noun} does {person.name} {base} {draw.pick(TOTALS[:3])}?",
        ]
    ), total
