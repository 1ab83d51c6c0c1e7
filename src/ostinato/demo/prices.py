"""Families about products: prices, change, and sums of two products."""

from __future__ import annotations

from .sheet import Draw, Sheet
from .words import CONTAINERS, TOTALS


def cost(draw: Draw, sheet: Sheet) -> tuple[str, int]:
    """Make a problem about the price of one product.

    `Mia buys 4 pens for 3 dollars each and pays with 50 dollars. How much change does she get?`
    """
    person, thing = draw.person(), draw.thing()
    count, price = (draw.factor(), draw.multiplicand()) if draw.chance(0.6) else (draw.multiplicand(), draw.factor())
    do = "do" if person.plural else "does"
    start = draw.number() if draw.chance(0.5) else 0
    spent = sheet.multiply(count, price)
    buys = draw.pick(
        [
            f"{count} {thing} for {price} dollars each",
            f"{count} {thing} at {price} dollars each",
            f"{count} {thing} that cost {price} dollars each",
            f"{count} {thing}. Each costs {price} dollars",
        ]
    )
    if start > spent:
        text = draw.pick(
            [
                f"{person.name} has {start} dollars and buys {buys}.",
                f"{person.name} has {start} dollars. {person.name} buys {buys}.",
                f"{person.name} buys {buys}. {person.name} pays with {start} dollars.",
            ]
        )
        left = sheet.subtract(start, spent)
        if draw.chance(0.25):
            more = draw.number()
            left = sheet.add(left, more)
            text += f" Then {person.name} earns {more} dollars."
        return text + " " + draw.pick(
            [
                f"How much money {do} {person.pronoun} have left?",
                "How many dollars are left?",
                f"How many dollars does {person.name} have left?",
                f"How much money does {person.name} have left?",
            ]
        ), left
    text = f"{person.name} {draw.pick(['buys', 'buys', 'bought', 'sells'])} {buys}."
    if draw.chance(0.3):
        one = thing[:-1]
        text = draw.pick(
            [
                f"Each {one} costs {price} dollars. {person.name} buys {count} {thing}.",
                f"A {one} costs {price} dollars. {person.name} buys {count} of them.",
                f"One {one} costs {price} dollars. {person.name} buys {count} {thing}.",
            ]
        )
    if draw.chance(0.7):
        extra = draw.number()
        spent = sheet.add(spent, extra)
        text += " " + draw.pick(
            [
                f"{person.name} also buys a book for {extra} dollars.",
                f"Shipping costs {extra} dollars.",
                f"A bag costs {extra} dollars more.",
            ]
        )
        if text.count("sells"):
            text = text.replace("sells", "buys")
        return text + " " + draw.pick(
            [
                f"How much {do} {person.pronoun} pay {draw.pick(TOTALS[:3])}?",
                f"How many dollars does {person.name} spend {draw.pick(TOTALS[:3])}?",
                "How much does it cost in total?",
                "What is the total cost?",
            ]
        ), spent
    if "sells" in text:
        return text + " " + draw.pick(
            [f"How many dollars does {person.name} get?", f"How much money {do} {person.pronoun} make?"]
        ), spent
    return text + " " + draw.pick(
        [
            f"How much {do} {person.pronoun} pay?",
            f"How many dollars does {person.name} spend?",
            "How much does it cost?",
            "What is the total cost?",
        ]
    ), spent


def two_products(draw: Draw, sheet: Sheet) -> tuple[str, int]:
    """Make a problem about the prices of two products.

    `Mia buys 4 pens for 3 dollars each and 2 books for 12 dollars each. How much does she pay?`
    """
    person = draw.person()
    first, second = draw.things(2)
    count, other_count = draw.factor(), draw.factor()
    each, other_each = draw.multiplicand(), draw.multiplicand()
    total = sheet.add(sheet.multiply(count, each), sheet.multiply(other_count, other_each))
    name = person.name
    do = "do" if person.plural else "does"
    if draw.chance(0.6):
        text = draw.pick(
            [
                f"{name} buys {count} {first} for {each} dollars each "
                f"and {other_count} {second} for {other_each} dollars each.",
                f"{name} buys {count} {first} at {each} dollars each "
                f"and {other_count} {second} at {other_each} dollars each.",
                f"{name} sells {count} {first} for {each} dollars each. "
                f"Then {person.pronoun} {'sell' if person.plural else 'sells'} {other_count} {second} "
                f"for {other_each} dollars each.",
            ]
        )
        verb = "make" if "sells" in text else draw.pick(["pay", "spend"])
        return text + " " + draw.pick(
            [
                f"How much {do} {person.pronoun} {verb}?",
                f"How many dollars does {name} {verb} {draw.pick(TOTALS[:3])}?",
                f"How much money does {name} {verb} {draw.pick(TOTALS[:3])}?",
            ]
        ), total
    (one, many), (other_one, others) = draw.pick(CONTAINERS), draw.pick(CONTAINERS)
    text = draw.pick(
        [
            f"{name} has {count} {many} of {each} {first} and {other_count} {others} of {other_each} {first}.",
            f"{name} has {count} {many} with {each} {first} each "
            f"and {other_count} {others} with {other_each} {first} each.",
            f"There are {count} {many} with {each} {first} in each {one} "
            f"and {other_count} {others} with {other_each} {first} in each {other_one}.",
        ]
    )
    noun = first.split()[-1]
    return text + " " + draw.pick(
        [
            f"How many {noun} are there {draw.pick(TOTALS[:3])}?",
            f"How many {noun} does {name} have {draw.pick(TOTALS[:3])}?",
        ]
    ), total
