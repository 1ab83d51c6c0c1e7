"""What travels between the scheduler and the runner: rows, the batch of one step, and its result.

What every row of every step has one of is a named tuple, made in a third of a dataclass's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class MediaUse(NamedTuple):
    """An image that tokens of a row stand for: those at positions `start` to `end - 1`, of which a row may have a part.
    Token `start + i` takes what the encoder wrote to `cells[i]`."""

    start: int
    end: int
    cells: Sequence[int]


class MediaToEncode(NamedTuple):
    """An image that the step encodes before its forward pass, one cell per token."""

    digest: str
    item: Any
    """What the encoder gets; the scheduler does not look into it."""
    cells: Sequence[int]


class Row(NamedTuple):
    """One request's part in a step.

    The step computes `token_ids` at positions `start`, `start + 1`, ... Their keys and values go into the blocks
    of `block_table`, whose entry i holds positions `i * block_size` to `(i + 1) * block_size - 1`. The state is
    read from `read_slot` (0: the zero state, nothing is read) and the state after the row's last token is written
    to `write_slots[0]`; with drafts, the state after input token i goes to `write_slots[i]`.
    """

    request_id: str
    token_ids: tuple[int, ...]
    start: int
    block_table: tuple[int, ...]
    read_slot: int = 0
    write_slots: tuple[int, ...] = (0,)
    checkpoints: tuple[tuple[int, int], ...] = ()
    """(position, slot): the state after the first `position` tokens of the request is also written to `slot`."""
    num_drafts: int = 0
    """Most drafts that this row may get in this step, behind its one token: at most the batch's `num_drafts`."""
    num_logits: int = 0
    """How many of the row's trailing positions need logits. A row that samples needs at least one."""
    samples: bool = False
    """Whether the row's last known token is computed in this step, so that its next token is sampled."""
    payload: Any = None
    """What the runner needs beyond tokens and memory (sampling state); the scheduler does not look into it."""
    rope: Any = None
    """Where the request's tokens stand for the rotary embedding, where that is not their position; the scheduler does
    not look into it."""
    media: tuple[MediaUse, ...] = ()
    """Images that tokens of the row stand for, by position."""
    follows: int | None = None
    """In a step ahead, the index of the request's row in the step before: the row's one token is the one sampled there,
    and `token_ids` has a 0 in its place. It is still on the device."""
    pane_table: tuple[int, ...] = ()
    """As `block_table`, for layers with a window, in a model that has panes. 0 where no token of the row sees any
    position."""

    @property
    def end(self) -> int:
        """Position after the row's last known token: its context length after the step, drafts aside."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one step, decode rows first.

    A decode row has at least one token computed before and computes exactly one known token and `num_drafts` drafts,
    of which those beyond its own `Row.num_drafts` are padding; every other row is a prefill row.
    """

    rows: tuple[Row, ...]
    num_decode_rows: int
    num_drafts: int = 0
    """The drafts of each decode row."""
    first: tuple[str, ...] = ()
    """Requests of which no step before has computed anything."""
    encode: tuple[MediaToEncode, ...] = ()
    """Images that rows of this step need and that no step before has encoded."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes at most, drafts among them."""
        return sum([len(row.token_ids) for row in self.rows]) + self.num_decode_rows * self.num_drafts


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: of the token that stands there, its rank (1 is best), and of the best ones."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class RowResult(NamedTuple):
    """What one row's step gave: the accepted drafts and the token sampled behind them (nothing for a prompt chunk that
    is not the last)."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One per accepted token, if the request asked for them."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the prompt tokens that follow the positions computed in this step, if the request asked for them."""
    error: Exception | None = None
    """Why this row alone has no result: it then gives nothing else, and its request ends. What ends all rows of a
    step is raised instead."""
    num_drafts: int = 0
    """Drafts that were proposed for the row."""
    ends: bool = False
    """Whether the last of the tokens completes an output that nothing can follow."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """One result per row of the batch, in its order."""

    rows: tuple[RowResult, ...] = field(default_factory=tuple)
