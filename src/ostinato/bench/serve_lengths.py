"""How long prompts and outputs are: distributions of lengths in tokens, as they are written on the command line."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from ostinato.errors import ConfigError

FORMS = "a number such as 128, uniform:LEAST:MOST such as uniform:64:256, or lognormal:MEDIAN:SIGMA, lognormal:128:0.5"


@dataclass(frozen=True)
class Lengths:
    """A distribution: `uniform` between two numbers, both included; or `lognormal`, whose logarithm has the mean
    log(`first`) and the standard deviation `second`, rounded, at least 1."""

    kind: Literal["uniform", "lognormal"]
    first: float
    second: float

    def draw(self, rng: random.Random) -> int:
        if self.kind == "uniform":
            return rng.randint(int(self.first), int(self.second))
        return max(1, round(self.first * rng.lognormvariate(0, self.second)))

    def __str__(self) -> str:
        if self.kind == "uniform" and self.first == self.second:
            return f"{self.first:.0f}"
        return f"{self.kind}:{self.first:g}:{self.second:g}"


def parse_lengths(option: str, text: str) -> Lengths:
    """`text` as `FORMS` says; anything else is a ConfigError that names `option`."""
    kind, *numbers = text.split(":")
    try:
        if not numbers:
            return _uniform(int(kind), int(kind))
        if kind == "uniform" and len(numbers) == 2:
            return _uniform(int(numbers[0]), int(numbers[1]))
        if kind == "lognormal" and len(numbers) == 2:
            median, sigma = int(numbers[0]), float(numbers[1])
            if median >= 1 and 0 <= sigma <= 3:
                return Lengths("lognormal", median, sigma)
    except ValueError:
        pass
    raise ConfigError(
        f"{option} {text!r} should be {FORMS}; lengths are whole numbers of at least 1, sigma is at most 3"
    )


def _uniform(least: int, most: int) -> Lengths:
    if not 1 <= least <= most:
        raise ValueError
    return Lengths("uniform", least, most)
