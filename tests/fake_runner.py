"""A runner without tensors, whose cache remembers what was written: a wrong block or slot gives wrong tokens.

Its model is a checksum: the next token depends on all earlier ones and their order, as they are found again
in the blocks and the slot of the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ostinato.schedule.batch import Batch, Row, RowResult, StepResult, TokenLogprobs

VOCABULARY = 50


def checksum(token_ids: Sequence[int], seed: int = 0) -> int:
    for token_id in token_ids:
        seed = (seed * 1_000_003 + token_id + 1) % (2**61 - 1)
    return seed


def next_token(token_ids: Sequence[int]) -> int:
    """The token that the model gives after `token_ids`."""
    return checksum(token_ids) % VOCABULARY


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """The first `count` tokens after `prompt`, computed without any cache."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@dataclass
class FakeRunner:
    """Runs batches whose rows have the prompt as payload, if prompt log-probabilities are wanted."""

    block_size: int
    has_attention: bool = True
    has_state: bool = True
    keys: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """(block, offset) -> (position, token)."""
    states: dict[int, int] = field(default_factory=dict)
    """Slot -> checksum of the tokens so far."""

    def run(self, batch: Batch) -> StepResult:
        self._check_writers(batch)
        return StepResult(tuple(self._run_row(row) for row in batch.rows))

    def fail(self, batch: Batch) -> None:
        """Leave behind what a step that breaks down may leave: anything, wherever it may write."""
        for row in batch.rows:
            for position in range(row.start, row.end):
                if self.has_attention:
                    self.keys[self._place(row, position)] = (-1, -1)
            if self.has_state:
                self.states[row.write_slots[0]] = -1

    def _place(self, row: Row, position: int) -> tuple[int, int]:
        return row.block_table[position // self.block_size], position % self.block_size

    def _check_writers(self, batch: Batch) -> None:
        blocks = [block for row in batch.rows for block in row.block_table]
        slots = [slot for row in batch.rows for slot in row.write_slots]
        if self.has_attention:
            assert len(set(blocks)) == len(blocks), "two rows have a block in common"
            assert 0 not in blocks, "a row has the null block"
        else:
            assert not blocks, "a row has blocks, and the model has no attention"
        if self.has_state:
            assert len(set(slots)) == len(slots), "two rows write to one slot"
            assert 0 not in slots, "a row writes to the null slot"
        else:
            assert set(slots) == {0}, "a row has a slot, and the model has no state layers"

    def _run_row(self, row: Row) -> RowResult:
        sums = []
        if self.has_attention:
            for position, token_id in enumerate(row.token_ids, start=row.start):
                self.keys[self._place(row, position)] = (position, token_id)
            found = [self.keys[self._place(row, position)] for position in range(row.end)]
            assert [position for position, _ in found] == list(range(row.end)), "a block holds another position"
            sums.append(checksum([token_id for _, token_id in found]))
        if self.has_state:
            before = 0 if row.read_slot == 0 else self.states[row.read_slot]
            self.states[row.write_slots[0]] = checksum(row.token_ids, before)
            sums.append(self.states[row.write_slots[0]])
        assert len(set(sums)) == 1, "blocks and slot tell of different tokens"
        tokens = (sums[0] % VOCABULARY,) if row.samples else ()
        assert row.num_logits >= len(tokens), "a row samples without logits"
        return RowResult(row.request_id, tokens, None, self._prompt_logprobs(row))

    def _prompt_logprobs(self, row: Row) -> tuple[TokenLogprobs, ...]:
        prompt = row.payload
        if prompt is None:
            return ()
        positions = range(row.end - row.num_logits, row.end)
        return tuple(TokenLogprobs(prompt[p + 1], -1.0, 1) for p in positions if p + 1 < len(prompt))
