"""What tests of speculation share: drafts that are right as far as is wanted, and steps that are counted by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ostinato.engine.engine import Engine
from ostinato.schedule.batch import Batch, Row, StepResult
from ostinato.speculate.proposer import Proposer
from tests.checkpoints import VOCAB_SIZE
from tests.parity import make_engine


def drafting_engine(name: str, speculative: Any, **settings: Any) -> Engine:
    """An engine of the parity tests that drafts in every step."""
    return make_engine(name, speculative=speculative, speculative_adaptive="off", **settings)


# Drafts as they are wanted


Wanted = Callable[[Row], tuple[int, int]]
"""Of a row with room for drafts: (how many it gets, how many of these are right)."""


def in_turn(k: int) -> Wanted:
    """All drafts that there is room for, of which 0, 1, ..., k are right, by the row's position."""
    return lambda row: (row.num_drafts, row.start % (k + 1))


class Script:
    """Proposes the tokens that follow in known texts, and a wrong one where a draft is to be rejected.

    `behind` is a proposer whose own drafts are made and thrown away.
    """

    def __init__(self, texts: Sequence[Sequence[int]], wanted: Wanted, behind: Proposer | None = None) -> None:
        """`texts` are those of all requests, prompts and outputs together; no two of them begin with one prompt."""
        self._texts = [list(text) for text in texts]
        self._wanted = wanted
        self._behind = behind

    def propose(self, batch: Batch) -> list[tuple[int, ...]]:
        if self._behind is not None:
            self._behind.propose(batch)
        return [self._drafts(row) if row.num_drafts else () for row in batch.rows]

    def _drafts(self, row: Row) -> tuple[int, ...]:
        given, right = self._wanted(row)
        prompt = list(row.payload.prompt_token_ids)
        [text] = [text for text in self._texts if text[: len(prompt)] == prompt]
        # Behind a text's end there are no right drafts; nor is there room for any.
        following = text[row.end : row.end + min(given, row.num_drafts)]
        return tuple(token if i < right else (token + 1) % VOCAB_SIZE for i, token in enumerate(following))


def script(engine: Engine, texts: Sequence[Sequence[int]], wanted: Wanted, keep: bool = False) -> None:
    """From now on the drafts are these. `keep`: what made drafts before goes on, and its drafts are thrown away."""
    drafting = engine.runner.drafting
    assert drafting is not None
    behind = drafting.proposer if keep else None
    engine.runner.drafting = replace(drafting, proposer=Script(texts, wanted, behind))


# Steps


class Watched:
    """The batches that an engine computes, and their results."""

    def __init__(self, engine: Engine) -> None:
        self.steps: list[tuple[Batch, StepResult]] = []
        run_batch = engine.runner.run

        def watched(batch: Batch) -> StepResult:
            result = run_batch(batch)
            self.steps.append((batch, result))
            return result

        engine.runner.run = watched  # type: ignore[method-assign]

    def verdicts(self) -> Counter[tuple[int, int]]:
        """How often a row had so many drafts, of which so many were accepted."""
        return Counter(
            (result.num_drafts, len(result.token_ids) - 1)
            for batch, results in self.steps
            for result in results.rows[: batch.num_decode_rows]
        )
