"""Families without a story: bare sums, and a pile of things that several people take from."""

from __future__ import annotations

from .sheet import Draw, OutOfRange, Sheet
from .words import capitalized

WHERE = [
    *("on the table", "in the basket", "in the box", "in the bag", "in the jar", "in the store"),
    *("in the kitchen", "on the shelf", "in the fridge", "in the garden", "on the tree", "in a bowl"),
    *("on a plate", "in the drawer", "in stock", "in the room"),
]


def bare_sum(draw: Draw, sheet: Sheet) -> tuple[str, int]:
    """Make a problem without a story.

    `What is 17 + 25 - 9?`
    """
    total = draw.number()
    if draw.chance(0.3):
        factor = draw.factor()
        first, second = (total, factor) if draw.chance(0.7) else (factor, total)
        text = f"{first}{draw.pick([' * ', ' times ', ' x ', ' multiplied by '])}{second}"
        total = sheet.multiply(first, second)
    else:
        text = str(total)
        plus, minus = draw.pick([(" + ", " - "), (" + ", " - "), (" plus ", " minus ")])
        for _ in range(draw.rng.choices([1, 2], [55, 45])[0]):
            if draw.chance(0.5):
                amount = draw.number()
                text += f"{plus}{amount}"
                total = sheet.add(total, amount)
            else:
                amount = draw.at_most(total)
                text += f"{minus}{amount}"
                total = sheet.subtract(total, amount)
    form = draw.pick(["What is {}?", "What is {}?", "How much is {}?", "Calculate {}?", "What's {}?", "{} = ?"])
    return form.format(text), total


def pile(draw: Draw, sheet: Sheet) -> tuple[str, int]:
    """Make a problem about a pile of things.

    `There are 17 apples on the table. Ava takes 5 and Ben adds 12. How many apples are left?`
    """
    thing = draw.thing()
    noun = thing.split()[-1]
    where = draw.pick(WHERE)
    total = draw.number()
    text = draw.pick([f"There are {total} {thing} {where}", f"There were {total} {thing} {where}"])
    for index in range(draw.rng.choices([1, 2, 3], [12, 60, 28])[0]):
        other = draw.pick([draw.subject().name, draw.person().name, "somebody"])
        if other == "I":  # the verbs below are in the third person
            raise OutOfRange
        if draw.chance(0.45):
            amount = draw.number()
            verb = draw.pick(["adds", "puts", "brings", "added", "put in", "brought"])
            what = draw.pick([" more", " more", f" more {noun}", f" {noun}"])
            total = sheet.add(total, amount)
        else:
            amount = draw.at_most(total)
            verb = draw.pick(["takes", "eats", "removes", "uses", "buys", "took", "ate", "removed", "sells"])
            what = draw.pick(["", "", f" {noun}", " of them", f" of the {noun}"])
            total = sheet.subtract(total, amount)
        if draw.chance(0.15):
            clause = (
                f"{amount} more are added"
                if verb in ("adds", "puts", "brings", "added", "put in", "brought")
                else draw.pick([f"{amount} are eaten", f"{amount} are sold", f"{amount} are taken away"])
            )
        else:
            clause = f"{other} {verb} {amount}{what}"
        text += f". {capitalized(clause)}" if index == 0 or draw.chance(0.6) else f" and {clause}"
    return f"{text}. " + draw.pick(
        [
            f"How many {noun} are {where} now?",
            f"How many {noun} are left?",
            f"How many {noun} are left {where}?",
            f"How many {noun} are there now?",
            "How many are left?",
            f"How many {noun} remain?",
        ]
    ), total
