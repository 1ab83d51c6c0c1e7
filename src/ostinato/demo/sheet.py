"""Helpers of the families of problems: drawing numbers and writing equations."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from .words import Person, draw_person, draw_subject, draw_thing

LARGEST = 999
Item = TypeVar("Item")


class OutOfRange(Exception):
    """Raised if a number left 0..999; the problem is drawn again."""


@dataclass
class Sheet:
    """The equations of a worked answer, in order."""

    lines: list[str] = field(default_factory=list)

    def _write(self, a: int, sign: str, b: int, result: int) -> int:
        if not 0 <= result <= LARGEST:
            raise OutOfRange
        self.lines.append(f"{a} {sign} {b} = {result}")
        return result

    def add(self, a: int, b: int) -> int:
        return self._write(a, "+", b, a + b)

    def subtract(self, a: int, b: int) -> int:
        return self._write(a, "-", b, a - b)

    def multiply(self, a: int, b: int) -> int:
        return self._write(a, "*", b, a * b)


@dataclass
class Draw:
    """The source of a problem's numbers and words. `hard` problems have operands of three digits."""

    rng: random.Random
    hard: bool
    unseen: float

    def pick(self, items: Sequence[Item]) -> Item:
        return items[self.rng.randrange(len(items))]

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def number(self) -> int:
        """Draw an amount of one or two digits, in a hard problem of up to three."""
        digits = self.rng.choices([1, 2, 3], [15, 45, 40] if self.hard else [30, 70, 0])[0]
        return self.rng.randint(2 if digits == 1 else 10 ** (digits - 1), 10**digits - 1)

    def at_most(self, limit: int) -> int:
        """Draw an amount that can be taken from `limit`; now and then all of it."""
        if limit < 1:
            raise OutOfRange
        amount = self.number()
        if amount <= limit:
            return amount
        return limit if self.chance(0.05) else self.rng.randint(1, limit)

    def factor(self) -> int:
        return self.rng.randint(2, 9)

    def multiplicand(self) -> int:
        """Draw a number to multiply by a factor: up to two digits, in a hard problem up to 400."""
        return self.rng.randint(2, 400) if self.hard else self.rng.randint(2, 40)

    def person(self) -> Person:
        return draw_person(self.rng, self.unseen)

    def subject(self) -> Person:
        return draw_subject(self.rng, self.unseen)

    def people(self, count: int) -> list[Person]:
        """Draw different people."""
        found: dict[str, Person] = {}
        while len(found) < count:
            person = self.person()
            found.setdefault(person.name, person)
        return list(found.values())

    def thing(self) -> str:
        return draw_thing(self.rng, self.unseen)

    def things(self, count: int) -> list[str]:
        """Draw different things."""
        found: dict[str, None] = {}
        while len(found) < count:
            found.setdefault(self.thing())
        return list(found)
