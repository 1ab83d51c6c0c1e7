"""Training sequences: questions with worked answers, conversations, bare questions, and drills.

A sequence is token ids and a loss weight per token. Batches hold sequences of similar length and about
the same number of tokens, padding included.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from ostinato.demo.counts import compare, transfer
from ostinato.demo.problems import RESULT_MARK, is_held_out, training_problem
from ostinato.demo.sheet import Draw, OutOfRange, Sheet

from .groups import by_length
from .tokenizer import END, spellings

PROMPT_WEIGHT = 0.1
CONVERSATIONS, BARE, SPELLED, LOWER_CASE = 0.15, 0.25, 0.10, 0.02
PAIRS_PER_POOL = 16


@dataclass
class Sequence:
    ids: list[int]
    weights: list[float]


@dataclass(frozen=True)
class Drills:
    """The share of drills among the sequences, and that of unrelated equations among the drills."""

    share: float
    sums: float


class Encoder:
    """Turns generated problems into sequences."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.end = tokenizer.token_to_id(END)
        self.spellings = spellings(tokenizer)

    def sequence(self, rng: random.Random, drills: Drills) -> Sequence:
        """One sequence, perhaps one of unrelated equations or of questions about who has what."""
        if rng.random() < drills.share:
            if rng.random() < drills.sums:
                return self._join([("", _sums(rng))], 0.0, rng)
            return self._join(_conversation([_who_has_what(rng) for _ in range(3)]), 0.0, rng)
        spelled = 0.15 if rng.random() < SPELLED else 0.0
        roll = rng.random()
        if roll < CONVERSATIONS:
            return self._join(_conversation([_turn(rng) for _ in range(rng.randint(2, 4))]), spelled, rng)
        question, answer = _turn(rng)
        if roll < CONVERSATIONS + BARE:
            start = "Q: " if rng.random() < 0.1 else ""
            return self._join([(start + question, f"\nA: {answer}")], spelled, rng)
        return self._join([(f"Q: {question}\nA:", f" {answer}")], spelled, rng)

    def _join(self, parts: list[tuple[str, str]], spelled: float, rng: random.Random) -> Sequence:
        """Sequence of (prompt, answer) parts. The weights mark the answers and the end token after each."""
        ids: list[int] = []
        weights: list[float] = []
        for prompt, answer in parts:
            prompt_ids = self._spell(self.tokenizer.encode(prompt).ids, spelled, rng)
            answer_ids = self.tokenizer.encode(answer).ids
            ids += prompt_ids + answer_ids + [self.end]
            weights += [PROMPT_WEIGHT] * len(prompt_ids) + [1.0] * (len(answer_ids) + 1)
        return Sequence(ids, weights)

    def _spell(self, ids: list[int], probability: float, rng: random.Random) -> list[int]:
        if not probability:
            return ids
        return [
            part
            for index in ids
            for part in (self.spellings[index] if index in self.spellings and rng.random() < probability else [index])
        ]


def _conversation(turns: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Questions and answers as the chat template writes them: prompts, each with what follows it."""
    return [
        (("\n" if index else "") + f"Q: {question}\nA:", f" {answer}") for index, (question, answer) in enumerate(turns)
    ]


def _turn(rng: random.Random) -> tuple[str, str]:
    problem = training_problem(rng)
    question = problem.question.lower() if rng.random() < LOWER_CASE else problem.question
    return question, problem.answer


def _sums(rng: random.Random) -> str:
    """Six unrelated equations, none of them held out."""
    draw = Draw(rng, hard=rng.random() < 0.5, unseen=0.0)
    lines: list[str] = []
    while len(lines) < 6:
        sheet = Sheet()
        try:
            kind = rng.randrange(3)
            if kind == 0:
                sheet.add(draw.number(), draw.number())
            elif kind == 1:
                total = draw.number() + draw.number()
                sheet.subtract(total, draw.at_most(total))
            else:
                factors = [draw.factor(), draw.multiplicand()]
                rng.shuffle(factors)
                sheet.multiply(*factors)
        except OutOfRange:
            continue
        if not is_held_out(sheet.lines[0]):
            lines += sheet.lines
    return ". ".join(lines)


def _who_has_what(rng: random.Random) -> tuple[str, str]:
    """A short question about one of several people, which only telling them apart answers."""
    while True:
        draw, sheet = Draw(rng, hard=False, unseen=0.25), Sheet()
        try:
            kind = rng.random()
            if kind < 0.4:
                question, result = transfer(draw, sheet)
            elif kind < 0.6:
                question, result = compare(draw, sheet)
            else:
                question, result = _bystanders(draw, sheet)
        except OutOfRange:
            continue
        equations = ". ".join(sheet.lines)
        if not is_held_out(equations):
            return question, f"{equations}. {RESULT_MARK} {result}"


def _bystanders(draw: Draw, sheet: Sheet) -> tuple[str, int]:
    """Several people have something, and what one of them has changes."""
    people, thing = draw.people(draw.rng.randint(2, 4)), draw.thing()
    amounts = [draw.number() for _ in people]
    told = [f"{person.name} has {amount}" for person, amount in zip(people, amounts, strict=True)]
    chosen = draw.rng.randrange(len(people))
    text = f"{told[0]} {thing}{draw.pick(['. ', ', ', ' and '])}" + draw.pick([". ", " and "]).join(told[1:])
    if draw.chance(0.5):
        amount = draw.number()
        change = f"{draw.pick(['finds', 'buys', 'gets'])} {amount}{draw.pick(['', ' more'])}"
        result = sheet.add(amounts[chosen], amount)
    else:
        amount = draw.at_most(amounts[chosen])
        change = f"{draw.pick(['loses', 'sells', 'eats'])} {amount}"
        result = sheet.subtract(amounts[chosen], amount)
    name = people[chosen].name
    return f"{text}. {name} {change}. How many does {name} have?", result


def batches(
    encoder: Encoder, pad: int, seed: int, pool: int, rank: int, tokens: int, drills: Drills
) -> list[tuple[Tensor, Tensor]]:
    """One pool of batches of one of two ranks: ids and weights [rows, length], at most `tokens` in all.

    Both ranks cut the same pool and take every other batch, so that theirs have alike lengths in each step.
    """
    rng = random.Random(f"training {seed} {pool}")
    sequences: list[Sequence] = []
    drawn = 0
    while drawn < 2 * PAIRS_PER_POOL * tokens:
        sequences.append(encoder.sequence(rng, drills))
        drawn += len(sequences[-1].ids)
    groups = by_length(sequences, tokens)
    pairs = [groups[index : index + 2] for index in range(0, len(groups) - 1, 2)]
    rng.shuffle(pairs)
    return [_pad(pair[rank], pad) for pair in pairs]


def _pad(group: list[Sequence], pad: int) -> tuple[Tensor, Tensor]:
    length = max(len(sequence.ids) for sequence in group)
    ids = torch.tensor([sequence.ids + [pad] * (length - len(sequence.ids)) for sequence in group])
    weights = torch.tensor([sequence.weights + [0.0] * (length - len(sequence.weights)) for sequence in group])
    return ids, weights
