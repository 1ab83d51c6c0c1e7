"""Workload of the load generator: conversations made of a seed alone, before the first one is sent."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from ostinato.demo import words
from ostinato.demo.problems import held_out
from ostinato.errors import ConfigError

FORMS = "a number such as 128, uniform:LEAST:MOST such as uniform:64:256, or lognormal:MEDIAN:SIGMA, lognormal:128:0.5"
WORDS = (*words.THINGS, *words.ADJECTIVES, *words.PLACES, *words.ROLES, *words.DAYS, *words.ANYONE)
"""Common words, most of them one token in any vocabulary."""


@dataclass(frozen=True)
class Lengths:
    """A distribution: `uniform` between two numbers, both included, or `lognormal`.

    The logarithm of a lognormal length has the mean log(`first`) and the standard deviation `second`; lengths are
    rounded, at least 1.
    """

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


@dataclass(frozen=True)
class LoadSpec:
    """The load: `requests` conversations of `turns` requests each; lengths are in tokens."""

    requests: int
    output_tokens: Lengths
    prompt_tokens: Lengths | None
    """Tokens that a request adds, as words. None sends word problems in their own length."""
    prefix_tokens: int = 0
    """Tokens of the prefix that all conversations of one group share, before those of `prompt_tokens`."""
    prefix_groups: int = 1
    turns: int = 1
    think_seconds: float = 0.0
    """Mean of the time, exponentially distributed, between an answer and the next turn."""
    seed: int = 0


@dataclass(frozen=True)
class ScriptedTurn:
    """Message of one request; `think_seconds` is the time between the answer before and this."""

    text: str
    output_tokens: int
    think_seconds: float = 0.0


@dataclass(frozen=True)
class ScriptedConversation:
    """A conversation. `arrival` of its first turn is in seconds since the beginning of the run."""

    arrival: float
    turns: tuple[ScriptedTurn, ...]


@dataclass(frozen=True)
class TokenEstimate:
    """Estimate of prompt tokens from words: the template's overhead and tokens per word."""

    per_word: float
    overhead: float = 0.0

    def words(self, tokens: float, *, opening: bool) -> int:
        """Return the number of words of a prompt of `tokens`, at least one. An `opening` prompt has the template."""
        return max(1, round((tokens - self.overhead * opening) / self.per_word))


def make_ruler(measured: Sequence[tuple[int, int]]) -> TokenEstimate:
    """Return the line through two prompts, each as (words, tokens)."""
    (few, fewer_tokens), (many, more_tokens) = measured
    per_word = (more_tokens - fewer_tokens) / (many - few)
    return TokenEstimate(per_word, fewer_tokens - per_word * few) if per_word > 0 else TokenEstimate(more_tokens / many)


def make_conversations(
    load: LoadSpec, ruler: TokenEstimate, *, chat: bool, rate: float | None = None, number: int = 0
) -> list[ScriptedConversation]:
    """Return the conversations of run `number`, in the order of their arrivals.

    Arrivals are a Poisson process of `rate` per second, the first one at 0; all are at 0 if it is infinite or None.
    Every run has the same lengths and other texts, so that it finds nothing that an earlier one left in a cache.
    """
    lengths = random.Random(f"{load.seed} lengths")
    texts = _problems(load, number, chat) if load.prompt_tokens is None else _words(load, ruler, number)
    conversations = []
    for arrival in _arrivals(load.requests, rate, random.Random(f"{load.seed} arrivals")):
        turns = []
        for turn in range(load.turns):
            think = lengths.expovariate(1 / load.think_seconds) if turn and load.think_seconds else 0.0
            turns.append(ScriptedTurn(next(texts), load.output_tokens.draw(lengths), think))
        conversations.append(ScriptedConversation(arrival, tuple(turns)))
    return conversations


def random_words(rng: random.Random, count: int) -> str:
    """Return `count` random words."""
    return " ".join(rng.choices(WORDS, k=count))


def _arrivals(count: int, rate: float | None, rng: random.Random) -> list[float]:
    if rate is None or math.isinf(rate):
        return [0.0] * count
    return list(accumulate((rng.expovariate(rate) for _ in range(count - 1)), initial=0.0))


def _words(load: LoadSpec, ruler: TokenEstimate, number: int) -> Iterator[str]:
    """Yield the words of each turn in order; the first of a conversation begins with the prefix of its group."""
    assert load.prompt_tokens is not None
    lengths = random.Random(f"{load.seed} prompts")
    rng = random.Random(f"{load.seed} texts {number}")
    prefix_words = ruler.words(load.prefix_tokens, opening=False)
    prefixes = [random_words(rng, prefix_words) for _ in range(load.prefix_groups if load.prefix_tokens else 0)]
    for conversation in range(load.requests):
        for turn in range(load.turns):
            text = random_words(rng, ruler.words(load.prompt_tokens.draw(lengths), opening=turn == 0))
            yield f"{prefixes[conversation % len(prefixes)]} {text}" if prefixes and turn == 0 else text


def _problems(load: LoadSpec, number: int, chat: bool) -> Iterator[str]:
    count = load.requests * load.turns
    for problem in held_out(load.seed, (number + 1) * count)[number * count :]:
        yield problem.question if chat else f"Q: {problem.question}\nA:"


def parse_lengths(option: str, text: str) -> Lengths:
    """Return the lengths in `text`, in one of the `FORMS`. ConfigError, which names `option`, for anything else."""
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
