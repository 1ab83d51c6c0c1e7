"""What tests of speculation share: drafts that are right as far as is wanted, and steps that are counted by hand."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ostinato.engine.core import EngineCore
from ostinato.scheduler.batch import Batch, BatchRow, StepResult
from ostinato.spec_decode.model_drafters import Proposer
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.parity import Case, make_engine


def drafting_engine(name: str, speculative: Any, **settings: Any) -> EngineCore:
    """An engine of the parity tests that drafts in every step."""
    return make_engine(name, speculative=speculative, speculative_adaptive="off", **settings)


# Drafts as they are wanted


Outputs = Mapping[tuple[int, ...], Sequence[int]]
"""Prompt -> the tokens of its output."""

Wanted = Callable[[BatchRow], tuple[int, int]]
"""Of a row with room for drafts: (how many it gets, how many of these are right)."""


def at_random(k: int, seed: int = 0) -> Wanted:
    """All drafts that there is room for, of which any number up to k is right."""
    generator = random.Random(seed)
    return lambda row: (row.num_drafts, generator.randint(0, k))


def uneven(k: int, seed: int = 0) -> Wanted:
    """Any number of drafts, of which any number is right."""
    generator = random.Random(seed)
    return lambda row: (generator.randint(0, k), generator.randint(0, k))


class Script:
    """Proposes the tokens that follow in known outputs, and a wrong one where a draft is to be rejected."""

    def __init__(self, outputs: Outputs, wanted: Wanted, behind: Proposer | None = None) -> None:
        """`behind` is a proposer whose own drafts are made and thrown away."""
        self._outputs = outputs
        self._wanted = wanted
        self.behind = behind

    def propose(self, batch: Batch) -> list[tuple[int, ...]]:
        if self.behind is not None:
            self.behind.propose(batch)
        return [self._drafts(row) if row.num_drafts else () for row in batch.rows]

    def _drafts(self, row: BatchRow) -> tuple[int, ...]:
        given, right = self._wanted(row)
        prompt = tuple(row.sampling_state.prompt_token_ids)
        done = row.end - len(prompt)
        # Behind an output's end no draft is right; nor is there room for any.
        following = self._outputs[prompt][done : done + min(given, row.num_drafts)]
        return tuple(token if i < right else (token + 1) % VOCAB_SIZE for i, token in enumerate(following))


def outputs_of(cases: Iterable[Case]) -> Outputs:
    return {tuple(case.prompt): case.tokens for case in cases}


def script(engine: EngineCore, outputs: Outputs, wanted: Wanted, keep: bool = False) -> None:
    """From now on the drafts are these. `keep`: what made drafts before goes on, and its drafts are thrown away."""
    drafting = engine.runner.drafter
    assert drafting is not None
    before = drafting.proposer
    behind = (before.behind if isinstance(before, Script) else before) if keep else None
    engine.runner.drafter = replace(drafting, proposer=Script(outputs, wanted, behind))


# Steps


class Watched:
    """The batches that an engine computes, and their results."""

    def __init__(self, engine: EngineCore) -> None:
        self.steps: list[tuple[Batch, StepResult]] = []
        run_batch = engine.runner.execute

        def watched(batch: Batch) -> StepResult:
            result = run_batch(batch)
            self.steps.append((batch, result))
            return result

        engine.runner.execute = watched  # type: ignore[method-assign]

    def verdicts(self) -> Counter[tuple[int, int]]:
        """How often a row had so many drafts, of which so many were accepted."""
        return Counter(
            (result.num_drafts, len(result.token_ids) - 1)
            for batch, results in self.steps
            for result in results.rows[: batch.num_decode_rows]
        )
