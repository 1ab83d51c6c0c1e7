"""Drafts as verification needs them: some right, some wrong, so that every anchor occurs, however good a drafter is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ostinato.engine.engine import Engine
from ostinato.ops.seeds import mix64
from ostinato.schedule.batch import Batch, Row
from ostinato.speculate.proposer import Proposer
from ostinato.speculative_setting import Speculative
from ostinato.verify.plain import Case

WRONG, RIGHT = 1, 2
"""Of every five positions: those whose draft is made wrong, and those whose draft is made right."""


def steer_drafts(engine: Engine, cases: Sequence[Case]) -> None:
    """Lets the engine's proposer be corrected and misled by what the plain path says; nothing without speculation, and
    where it cannot be (`unsteered`)."""
    drafting = engine.runner.drafting
    if drafting is not None and not (drafting.has_weights and engine.plan.settings.tensor_parallel_size > 1):
        steered = SteeredProposer(
            drafting.proposer, engine.spec.vocab_size, cases, keeps_state=drafting.model is not None
        )
        engine.runner.drafting = replace(drafting, proposer=steered)


def unsteered(ranks: int, methods: Sequence[Speculative | None]) -> list[str]:
    """Why some drafts are as their drafter makes them. Each rank has the drafts of its own part of the weights, and
    what is changed on the first one would not reach the others."""
    own = [each.method for each in methods if each is not None and each.method != "ngram"]
    if ranks == 1 or not own:
        return []
    return [f"drafts made right or wrong on purpose: with {ranks} ranks, those of {' and '.join(own)} stay as they are"]


class SteeredProposer:
    """Another proposer's drafts, of which those at some positions are wrong instead, and at others right.

    Where it finds fewer than a row has room for, right ones are added now and then. What is changed depends on the
    text alone, so it is drafted alike whenever it comes. A draft model's state stands for the tokens that it guessed
    itself: what it makes of a changed text gets worse, and no token wrong. So with `keeps_state` every second text is
    left alone.
    """

    def __init__(self, proposer: Proposer, vocab_size: int, cases: Sequence[Case], *, keeps_state: bool) -> None:
        self._proposer = proposer
        self._keeps_state = keeps_state
        self._vocab_size = vocab_size
        self._tokens = {(case.params.greedy, case.prompt): case.tokens for case in cases}

    def propose(self, batch: Batch) -> list[tuple[int, ...]]:
        proposed = self._proposer.propose(batch)
        return [
            tuple(self._steered(row, drafts)) if row.num_drafts else ()
            for row, drafts in zip(batch.rows, proposed, strict=True)
        ]

    def _steered(self, row: Row, drafts: tuple[int, ...]) -> Sequence[int]:
        if self._keeps_state and len(row.payload.prompt_token_ids) % 2:
            return drafts
        right = self._right(row)
        # Of rows whose drafter finds nothing, half get none.
        count = max(len(drafts), len(right)) if mix64(row.end) % 2 else len(drafts)
        steered = []
        for place in range(min(count, row.num_drafts)):
            own = drafts[place] if place < len(drafts) else right[place]
            known = right[place] if place < len(right) else own
            dice = mix64(row.end + place) % 5
            changed = (known + 1) % self._vocab_size if dice < WRONG else known
            steered.append(changed if dice < WRONG + RIGHT else own)
        return steered

    def _right(self, row: Row) -> tuple[int, ...]:
        """The plain path's tokens from the row's end on, as far as they are known."""
        state = row.payload
        prompt = tuple(state.prompt_token_ids)
        tokens = self._tokens.get((state.params.greedy, prompt), ())
        return tokens[row.end - len(prompt) :]
