"""Data between the scheduler and the runner: rows, the batch of one step, and its result.

A type with one instance for every row of every step is a named tuple, made in a third of a dataclass's time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class MediaUse(NamedTuple):
    """An image whose tokens are those at positions `start` to `end - 1`; a row may have a part of them.

    Token `start + i` takes the encoder's output in `cells[i]`.
    """

    start: int
    end: int
    cells: Sequence[int]


class MediaToEncode(NamedTuple):
    """An image that the step encodes before its forward pass, one cell per token."""

    digest: str
    item: Any
    """The encoder's input; the scheduler does not look into it."""
    cells: Sequence[int]


class BatchRow(NamedTuple):
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
    """Most drafts that this row may get in this step, after its one token: at most the batch's `num_drafts`."""
    num_logits: int = 0
    """Number of the row's trailing positions that need logits. A row that samples needs at least one."""
    samples: bool = False
    """True if the row's last known token is computed in this step, so that its next token is sampled."""
    sampling_state: Any = None
    """Sampling state that the runner needs beyond tokens and memory; the scheduler does not look into it."""
    rope: Any = None
    """Positions for the rotary embedding if they differ from the tokens'; the scheduler passes them on."""
    media: tuple[MediaUse, ...] = ()
    """Images that tokens of the row belong to, by position."""
    previous_row: int | None = None
    """Index of the request's row in the step before, in an overlapped step.

    The row's one token is the one sampled there, which is still on the device; `token_ids` has a 0 in its place.
    """
    window_block_table: tuple[int, ...] = ()
    """Window blocks, indexed as `block_table`, in a model with windows. 0 for blocks that no token of the row sees."""
    num_scored: int = 0
    """Number of positions that give prompt log-probabilities: the first of those with logits. Such a row has no drafts.
    """
    prompt_end: int = 0
    """Position after a prefix LM's prompt, whose tokens see each other in both directions; else 0."""

    @property
    def end(self) -> int:
        """Position after the row's last known token: its context length after the step, drafts aside."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one step, decode rows first.

    A decode row has at least one token computed before and computes exactly one known token, its last, and `num_drafts`
    drafts; those beyond its `BatchRow.num_drafts` are padding. Every other row is a prefill row.
    """

    rows: tuple[BatchRow, ...]
    num_decode_rows: int
    num_drafts: int = 0
    """The drafts of each decode row."""
    new_request_ids: tuple[str, ...] = ()
    """Requests for which no earlier step has computed anything."""
    images_to_encode: tuple[MediaToEncode, ...] = ()
    """Images that rows of this step need and that no step before has encoded."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes at most, drafts among them."""
        return sum([len(row.token_ids) for row in self.rows]) + self.num_decode_rows * self.num_drafts


class Logprob(NamedTuple):
    """Log-probability of one token at a position, its rank there (1 is best), and its text, if it was decoded."""

    logprob: float
    rank: int
    text: str | None = None

    @property
    def decoded_token(self) -> str | None:
        """The text, by vLLM's name."""
        return self.text


@dataclass(frozen=True, slots=True)
class TokenLogprobs(Mapping[int, Logprob]):
    """Log-probabilities at one position: of the token there, its rank (1 is best), and of the best tokens.

    It is also a mapping of token ids to `Logprob`, as in vLLM: first the token there, then the best ones.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()

    @property
    def text(self) -> str | None:
        """Text of the token, which the outputs of LLM and AsyncLLM have."""
        return self._text_of(self.token_id)

    @property
    def texts(self) -> Sequence[str | None]:
        """Text of the token, then of each in `top`."""
        return [self._text_of(token_id) for token_id in (self.token_id, *(best for best, _ in self.top))]

    def _text_of(self, token_id: int) -> str | None:  # noqa: ARG002
        return None

    def __getitem__(self, token_id: int) -> Logprob:
        if token_id == self.token_id:
            return Logprob(self.logprob, self.rank, self._text_of(token_id))
        for place, (best, logprob) in enumerate(self.top, 1):
            if best == token_id:
                return Logprob(logprob, place, self._text_of(token_id))
        raise KeyError(f"{token_id} is not among {', '.join(map(str, self))}; a larger logprobs gives more tokens")

    def __iter__(self) -> Iterator[int]:
        yield self.token_id
        yield from (token_id for token_id, _ in self.top if token_id != self.token_id)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(frozen=True, slots=True, repr=False)
class DecodedLogprobs(TokenLogprobs):
    """Log-probabilities with the texts of their tokens, which are decoded when they are read: most never are."""

    decode: Callable[[int], str] = field(kw_only=True, compare=False)

    def _text_of(self, token_id: int) -> str:
        return self.decode(token_id)

    def __repr__(self) -> str:
        shown = (self.token_id, self.logprob, self.rank, self.top)
        return f"DecodedLogprobs({', '.join(map(repr, shown))}, texts={self.texts!r})"

    def __getstate__(self) -> list[object]:
        """Return the fields, with the texts in place of the tokenizer."""
        texts = {token_id: self.decode(token_id) for token_id in self}
        return [self.token_id, self.logprob, self.rank, self.top, texts.__getitem__]


class RowResult(NamedTuple):
    """Result of a row: accepted drafts and the token after them; no tokens for a chunk before the last."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One per accepted token, if the request asked for them."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of the prompt tokens after the positions computed in this step, if the request asked for them.
    """
    error: Exception | None = None
    """Reason why this row alone has no result: it then gives nothing else, and its request ends.

    An error that ends all rows of a step is raised instead.
    """
    num_drafts: int = 0
    """Drafts that were proposed for the row."""
    grammar_ended: bool = False
    """True if the last of the tokens completes an output that nothing can follow."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """One result per row of the batch, in its order."""

    rows: tuple[RowResult, ...] = field(default_factory=tuple)
