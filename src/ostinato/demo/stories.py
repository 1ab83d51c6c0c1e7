"""Families in which one amount changes step by step: a person has things, gets some and loses some."""

from __future__ import annotations

from .sheet import Draw, Sheet
from .words import CONTAINERS, PLACES, Person, capitalized, singular

# Third person, plain and past form, and the words after the amount; `{o}` is another person, `{p}` a possessive.
GAINS = [
    ("buys", "buy", "bought", ""),
    ("finds", "find", "found", ""),
    ("gets", "get", "got", ""),
    ("picks", "pick", "picked", ""),
    ("wins", "win", "won", ""),
    ("makes", "make", "made", ""),
    ("collects", "collect", "collected", ""),
    ("receives", "receive", "received", ""),
    ("gathers", "gather", "gathered", ""),
    ("picks up", "pick up", "picked up", ""),
    ("gets", "get", "got", " from {o}"),
    ("receives", "receive", "received", " from {o}"),
    ("buys", "buy", "bought", " at the {place}"),
    ("finds", "find", "found", " in the {place}"),
    ("borrows", "borrow", "borrowed", " from {o}"),
    ("takes", "take", "took", " from {o}"),
    ("adds", "add", "added", ""),
    ("earns", "earn", "earned", ""),
    ("orders", "order", "ordered", ""),
    ("is given", "are given", "was given", ""),
]
LOSSES = [
    ("gives away", "give away", "gave away", ""),
    ("loses", "lose", "lost", ""),
    ("sells", "sell", "sold", ""),
    ("eats", "eat", "ate", ""),
    ("uses", "use", "used", ""),
    ("breaks", "break", "broke", ""),
    ("throws away", "throw away", "threw away", ""),
    ("drops", "drop", "dropped", ""),
    ("gives", "give", "gave", " to {o}"),
    ("sells", "sell", "sold", " to {o}"),
    ("lends", "lend", "lent", " to {o}"),
    ("gives", "give", "gave", " to {p} friend"),
    ("gives", "give", "gave", " to {p} sister"),
    ("hands", "hand", "handed", " to {o}"),
    ("sends", "send", "sent", " to {o}"),
    ("sells", "sell", "sold", " at the {place}"),
    ("leaves", "leave", "left", " at the {place}"),
    ("donates", "donate", "donated", ""),
    ("spends", "spend", "spent", ""),
    ("uses up", "use up", "used up", ""),
    ("shares", "share", "shared", " with {o}"),
    ("returns", "return", "returned", ""),
]
JOINS = [" and", " and then", ", then", ", and", ", and then"]
OPENERS = [
    "{S}",
    "{S}",
    "{S}",
    "Then {s}",
    "After that, {s}",
    "Later, {s}",
    "Later {s}",
    "Next, {s}",
    "Then, {s}",
    "The next day, {s}",
    "{N}",
    "Then {N}",
    "{S} then",
    "{S} also",
]


def change(
    draw: Draw, sheet: Sheet, total: int, person: Person, thing: str, past: bool, plural: bool
) -> tuple[str, int]:
    """Return a change of an amount: a verb phrase without its subject, and the amount after it."""
    kind = draw.rng.choices(["gain", "loss", "times"], [10, 10, 1])[0]
    if kind == "times":
        return _multiplied(draw, sheet, total, person, thing, 2 if past else int(plural))
    gain = kind == "gain"
    verb = draw.pick(GAINS if gain else LOSSES)
    form = verb[2] if past else verb[int(plural)]
    if past and plural and form == "was given":
        form = "were given"
    amount = draw.number() if gain else draw.at_most(total)
    if draw.chance(0.04) and total:
        amount = 1
    noun = singular(thing) if amount == 1 else thing
    if gain:
        what = draw.pick([" more", " more", " more", f" more {noun}", f" {noun}", "", f" other {noun}"])
    else:
        what = draw.pick(["", "", "", f" {noun}", f" of the {thing}", " of them", f" of {person.possessive} {thing}"])
    other = draw.person()
    tail = verb[3].format(
        o=draw.pick([other.name, other.name, "a friend"]), p=person.possessive, place=draw.pick(PLACES)
    )
    text = f"{form} {amount}{what}{tail}"
    if not gain and tail.startswith(" to ") and draw.chance(0.3):
        text = f"{form} {tail[4:]} {amount}{what}"
    return text, (sheet.add if gain else sheet.subtract)(total, amount)


def _multiplied(draw: Draw, sheet: Sheet, total: int, person: Person, thing: str, form: int) -> tuple[str, int]:
    """Return a change to a multiple of the amount. `form`: the verb in third person, plain or past."""
    if draw.chance(0.5):
        verb = draw.pick([("doubles", "double", "doubled"), ("triples", "triple", "tripled")])
        whose = draw.pick([f"{person.possessive} {thing}", "the number", "that number", f"the number of {thing}"])
        return f"{verb[form]} {whose}", sheet.multiply(total, 2 if verb[0] == "doubles" else 3)
    ends = ("ends up with", "end up with", "ended up with")[form]
    factor = draw.factor()
    much = "twice as many"
    if factor > 2:
        much = draw.pick([f"{factor} times as many", f"{factor} times that number"])
    return f"{ends} {much}", sheet.multiply(total, factor)


def given(draw: Draw, sheet: Sheet, total: int, person: Person, thing: str, past: bool) -> tuple[str, int]:
    """Return a whole sentence in which another person changes what `person` has."""
    whose = capitalized(person.possessive if person.speaker or draw.chance(0.3) else f"{person.name}'s")
    other = draw.pick([draw.person().name, "A friend", f"{whose} brother", f"{whose} mother"])
    if draw.chance(0.5):
        amount = draw.number()
        what = draw.pick([" more", f" more {thing}", f" {thing}", ""])
        verb = draw.pick([("gives", "gave"), ("sends", "sent"), ("brings", "brought"), ("buys", "bought")])[past]
        return f"{other} {verb} {person.object} {amount}{what}.", sheet.add(total, amount)
    amount = draw.at_most(total)
    verb = draw.pick([("takes", "took"), ("eats", "ate"), ("borrows", "borrowed"), ("breaks", "broke")])[past]
    return f"{other} {verb} {amount} of {draw.pick(['them', f'the {thing}'])}.", sheet.subtract(total, amount)


def how_many_left(draw: Draw, person: Person, thing: str, past: bool) -> str:
    """Return the closing question about what `person` has in the end."""
    do = "did" if past and draw.chance(0.3) else "do" if person.plural else "does"
    noun = thing.split()[-1]
    does = "do" if person.speaker else "does"
    return draw.pick(
        [
            f"How many {noun} are left?",
            f"How many {noun} {do} {person.pronoun} have now?",
            f"How many {thing} {does} {person.name} have now?",
            f"How many {does} {person.name} have left?",
            f"How many {noun} {does} {person.name} have left?",
            f"How many {noun} {do} {person.pronoun} have left?",
            f"How many {thing} {does} {person.name} have?",
            f"How many {do} {person.pronoun} have now?",
            f"How many {noun} {do} {person.pronoun} have in the end?",
            "How many are left?",
            "How many are there now?",
            f"How many {noun} {do} {person.pronoun} have in total?",
            f"How many {noun} {do} {person.pronoun} have?",
            f"What is the number of {thing} {person.name} {'have' if person.speaker else 'has'} now?",
            f"How many {noun} remain?",
            f"How many {noun}?",
            f"How many {noun} {does} {person.name} have in total now?",
            f"Now how many {noun} {do} {person.pronoun} have?",
            f"How many {noun} {does} {person.name} have at the end?",
            f"How many {do} {person.pronoun} have left now?",
        ]
    )


def story(draw: Draw, sheet: Sheet) -> tuple[str, int]:
    """Make a problem in which an amount changes step by step.

    `Ava has 17 apples and buys 25 more. She gives away 9. How many apples are left?`
    """
    person, thing, past = draw.subject(), draw.thing(), draw.chance(0.3)
    total = draw.number()
    text = _start(draw, total, person, thing, past)
    plural = person.speaker
    joinable = True
    for _ in range(draw.rng.choices([1, 2, 3], [12, 53, 35])[0]):
        roll = draw.rng.random()
        if joinable and roll < 0.4:
            phrase, total = change(draw, sheet, total, person, thing, past, plural)
            text += f"{draw.pick(JOINS)} {phrase}"
            continue
        text += "." if joinable else ""
        if roll < 0.5:
            sentence, total = given(draw, sheet, total, person, thing, past)
            text += f" {sentence}"
            joinable = False
            continue
        subject, plural = reference(draw, person)
        phrase, total = change(draw, sheet, total, person, thing, past, plural)
        text += f" {subject} {phrase}"
        joinable = True
    text += "." if joinable else ""
    return f"{text} {how_many_left(draw, person, thing, past)}", total


def _start(draw: Draw, amount: int, person: Person, thing: str, past: bool) -> str:
    """Return the first clause of a story, without its full stop."""
    forms = [("has", "have", "had")] * 4 + [
        ("starts with", "start with", "started with"),
        ("buys", "buy", "bought"),
        ("picks", "pick", "picked"),
        ("owns", "own", "owned"),
        ("finds", "find", "found"),
        ("makes", "make", "made"),
    ]
    verb = draw.pick(forms)[2 if past else int(person.speaker)]
    name = person.name.replace("the ", draw.pick(["a ", "the "]), 1)
    of = draw.pick([""] * 9 + [f"a {draw.pick(CONTAINERS)[0]} of "])
    return capitalized(f"{draw.pick([''] * 9 + ['At first, '])}{name} {verb} {of}{amount} {thing}")


def reference(draw: Draw, person: Person) -> tuple[str, bool]:
    """Return the subject of a new sentence about a known person, and whether plain verbs follow."""
    opener = draw.pick(OPENERS)
    text = opener.format(S=capitalized(person.pronoun), s=person.pronoun, N=person.name)
    return capitalized(text), person.speaker or (person.plural and "{N}" not in opener)


def condition(draw: Draw, sheet: Sheet) -> tuple[str, int]:
    """Make a problem of a single sentence with a condition.

    `If Ava has 17 apples and buys 25 more, how many apples does she have?`
    """
    person, thing = draw.subject(), draw.thing()
    total = draw.number()
    have = "have" if person.speaker else "has"
    text = f"If {person.name} {have} {total} {thing}"
    for _ in range(draw.rng.choices([1, 2], [40, 60])[0]):
        phrase, total = change(draw, sheet, total, person, thing, False, person.speaker)
        text += f" and {phrase}" if "," in text or draw.chance(0.7) else f", {phrase}"
    question = how_many_left(draw, person, thing, False)
    return f"{text}, {question[0].lower()}{question[1:]}", total


def days(draw: Draw, sheet: Sheet) -> tuple[str, int]:
    """Make a problem about the same amount on several days.

    `Leo picks 12 plums each day for 5 days. Then he eats 8. How many plums are left?`
    """
    person, thing, past = draw.person(), draw.thing(), draw.chance(0.2)
    each, count = draw.multiplicand(), draw.factor()
    unit = draw.pick(["day", "week", "hour", "month", "morning"])
    forms = draw.pick(
        [
            ("picks", "pick", "picked"),
            ("makes", "make", "made"),
            ("buys", "buy", "bought"),
            ("collects", "collect", "collected"),
            ("finds", "find", "found"),
            ("gets", "get", "got"),
            ("sells", "sell", "sold"),
            ("packs", "pack", "packed"),
        ]
    )
    verb, plain = forms[2 if past else 0], forms[1]
    per = draw.pick([f"each {unit}", f"every {unit}", f"per {unit}", f"a {unit}"])
    text = draw.pick(
        [
            f"{person.name} {verb} {each} {thing} {per} for {count} {unit}s.",
            f"For {count} {unit}s, {person.name} {verb} {each} {thing} {per}.",
            f"Every {unit} {person.name} {verb} {each} {thing}. {person.pronoun.capitalize()} "
            f"{'did' if past else 'do' if person.plural else 'does'} this for {count} {unit}s.",
        ]
    )
    total = sheet.multiply(each, count)
    steps = draw.rng.choices([0, 1, 2], [12, 68, 20])[0] if plain != "sell" else 0
    for _ in range(steps):
        subject, plural = reference(draw, person)
        phrase, total = change(draw, sheet, total, person, thing, past, plural)
        text += f" {subject} {phrase}."
    if steps:
        return f"{text} {how_many_left(draw, person, thing, past)}", total
    noun = thing.split()[-1]
    tail = draw.pick(["", " in total", " altogether", " in all"])
    return f"{text} How many {noun} does {person.name} {plain}{tail}?", total
