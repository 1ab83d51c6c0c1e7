"""Arithmetic word problems of one to three steps, with worked answers: the embedded model's subject.

A worked answer is a chain of equations and a result: `17 + 25 = 42. 42 - 9 = 33. #### 33`. Problems whose chain of
equations hashes to a fixed residue are held out: training never draws them, evaluation no others.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from . import counts, flows, prices, stories, sums
from .sheet import Draw, OutOfRange, Sheet

Family = Callable[[Draw, Sheet], tuple[str, int]]
"""Function that writes its equations on the sheet, in the order of the worked answer -> the question and the result."""

FAMILIES: dict[str, tuple[Family, float]] = {
    "story": (stories.story, 9.0),
    "condition": (stories.condition, 1.0),
    "pile": (sums.pile, 2.0),
    "bare_sum": (sums.bare_sum, 1.0),
    "days": (stories.days, 2.0),
    "saving": (flows.saving, 2.0),
    "riders": (flows.riders, 2.0),
    "compare": (counts.compare, 4.0),
    "transfer": (counts.transfer, 4.0),
    "boxes": (counts.boxes, 2.5),
    "cost": (prices.cost, 2.5),
    "two_products": (prices.two_products, 2.0),
    "parts": (counts.parts, 1.5),
    "week": (flows.week, 2.0),
    "gather": (counts.gather, 1.5),
}
"""Families of problems: a function that makes one, and how often it is drawn."""

HELD_OUT_MODULUS = 16
HARD_SHARE = 0.25
RESULT_MARK = "####"


@dataclass(frozen=True)
class WordProblem:
    """A question, its worked answer, the number that the answer states, and its family."""

    question: str
    answer: str
    result: int
    family: str


def is_held_out(equations: str) -> bool:
    """Return whether a chain of equations, such as `17 + 25 = 42. 42 - 9 = 33`, is kept from training."""
    return zlib.crc32(equations.encode()) % HELD_OUT_MODULUS == 0


def extract_result(text: str) -> int | None:
    """Return the number that a generated answer states after `####`, the first if several; None if there is none."""
    found = re.search(rf"{RESULT_MARK} ?(\d+)", text)
    return int(found.group(1)) if found else None


def training_problem(rng: random.Random, unseen: float = 0.25) -> WordProblem:
    """Return a problem that is not held out. `unseen`: probability of a rare or invented word for a name or thing."""
    return _draw(rng, unseen, lambda equations: not is_held_out(equations))


def held_out(seed: int, count: int) -> list[WordProblem]:
    """Return `count` different problems that training never saw, the same ones for the same seed."""
    rng = random.Random(f"held-out {seed}")
    problems: dict[str, WordProblem] = {}
    while len(problems) < count:
        problem = _draw(rng, 0.25, is_held_out)
        problems.setdefault(problem.question, problem)
    return list(problems.values())


def _draw(rng: random.Random, unseen: float, wanted: Callable[[str], bool]) -> WordProblem:
    """Draw problems until the numbers stay in range and the equations are wanted, and return the last one."""
    names, weights = list(FAMILIES), [weight for _, weight in FAMILIES.values()]
    while True:
        family = rng.choices(names, weights)[0]
        draw = Draw(rng, hard=rng.random() < HARD_SHARE, unseen=unseen)
        sheet = Sheet()
        try:
            question, result = FAMILIES[family][0](draw, sheet)
        except OutOfRange:
            continue
        equations = ". ".join(sheet.lines)
        if wanted(equations):
            return WordProblem(question, f"{equations}. {RESULT_MARK} {result}", result, family)
