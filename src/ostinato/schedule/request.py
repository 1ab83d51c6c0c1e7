"""A request on its way: its tokens, how many of them are computed, when it ends, and its row in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from ostinato.cache.chain import Chain, MediaSpan
from ostinato.cache.holding import Holding
from ostinato.cache.memory import Carried
from ostinato.cache.placement import Placement
from ostinato.cache.report import CacheReport
from ostinato.schedule.batch import MediaUse, Row, RowResult, TokenLogprobs


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """A stop token, an end-of-sequence token or a stop string."""
    LENGTH = "length"
    """`max_tokens` tokens were generated, or the request reached `max_model_len`."""
    ABORT = "abort"
    MOVED = "moved"
    """Another engine goes on with it."""
    ERROR = "error"
    """The step that computed it failed, or the step's result for it alone."""


class RequestStatus(StrEnum):
    WAITING = "waiting"
    """Holds no memory; has not begun, or was preempted."""
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class StopConditions:
    """When a request's output ends, as far as token ids tell.

    A stop token counts only once `min_tokens` tokens, itself among them, have been generated. `ignore_eos`
    concerns `eos_token_ids` alone.
    """

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    ends: frozenset[int] = field(init=False, repr=False, compare=False)
    """All tokens that end the output."""

    def __post_init__(self) -> None:
        eos = frozenset() if self.ignore_eos else self.eos_token_ids
        object.__setattr__(self, "ends", self.stop_token_ids | eos)


@dataclass(slots=True, eq=False)
class Request:
    """One sequence to be continued. The caller gives the fields up to `carried`; the scheduler owns the rest. Of one
    that comes from another engine, the caller also gives what that one knew: see `resume`."""

    request_id: str
    prompt_token_ids: Sequence[int]
    stop: StopConditions
    priority: int = 0
    """Lower is served first, if the scheduler's policy is `priority`."""
    wants_prompt_logprobs: bool = False
    payload: Any = None
    """What the runner needs beyond tokens and memory; it travels in the request's rows."""
    cache_salt: str | None = None
    """Only requests of the same salt find each other's blocks."""
    media: Sequence[MediaSpan] = ()
    """The images that tokens of the prompt stand for, by position."""
    rope: Any = None
    """See `Row.rope`."""
    client: str | None = None
    """Whose it is: clients take turns."""
    looks_back: int = 0
    """How many of its outputs are chosen with a look at the ones before them, which must be known by then."""
    computes_all: bool = False
    """Whether each of its tokens is computed, also those that the prefix cache has."""
    has_begun: bool = False
    """Whether another engine has computed some of it."""
    num_elsewhere: int = 0
    """Tokens whose keys, values and state that engine had when it let go of it; 0 once they are here, or lost."""
    carried: Carried | None = None
    """What came with it of those, until it is admitted."""

    output_token_ids: list[int] = field(default_factory=list)
    num_tokens: int = field(init=False)
    """All known tokens: the prompt and what was generated."""
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    """The stop token or end-of-sequence token that ended the request."""
    num_computed_tokens: int = 0
    """Tokens whose keys, values and state are in the cache; back to 0 when the request is preempted."""
    num_prompt_logprobs: int = 0
    """Positions, from the first on, whose prompt log-probabilities were delivered; kept by a preemption."""
    num_preemptions: int = 0
    arrival: int = 0
    """Sequence number of the arrival, given by the scheduler."""
    rank: tuple[int, float, int] = (0, 0, 0)
    """Order of service, lowest first: (priority or 0, turn, arrival). Unique. Of one client, turns are as arrivals."""
    max_num_tokens: int = 0
    """Length of prompt and output at which the request ends with `length`."""
    chain: Chain | None = None
    """Its full blocks, hashed; made by the first look into the index, if there is prefix caching."""
    placement: Placement | None = None
    """Where its checkpoints go, while it runs."""
    cache_report: CacheReport | None = None
    """What the prefix cache gave to the prompt, once it was admitted."""

    def __post_init__(self) -> None:
        self.num_tokens = len(self.prompt_token_ids) + len(self.output_token_ids)

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """The known tokens at positions `start` to `end - 1`; costs O(end - start)."""
        split = len(self.prompt_token_ids)
        if start >= split:
            return tuple(self.output_token_ids[start - split : end - split])
        if end <= split:
            return tuple(self.prompt_token_ids[start:end])
        return (*self.prompt_token_ids[start:], *self.output_token_ids[: end - split])

    def resume(self, token_ids: Sequence[int], num_prompt_logprobs: int, num_preemptions: int) -> None:
        """Take over what another engine has given: output tokens, and positions with prompt log-probabilities."""
        self.output_token_ids += token_ids
        self.num_tokens += len(token_ids)
        self.num_prompt_logprobs, self.num_preemptions = num_prompt_logprobs, num_preemptions

    def accept(self, token_ids: Sequence[int], ends: bool = False) -> tuple[int, FinishReason | None]:
        """Append generated tokens up to the one that ends the request; with `ends`, the last of them does.

        Returns how many were appended, and why the request ends, if it does. Nothing but its length ends it before
        `min_tokens`. A stop token is part of the output, and where it is also the last token that length allows, the
        reason is `stop`.
        """
        stop, output = self.stop, self.output_token_ids
        for count, token_id in enumerate(token_ids, start=1):
            output.append(token_id)
            self.num_tokens += 1
            if token_id in stop.ends and len(output) >= stop.min_tokens:
                self.stop_reason = token_id
                return count, FinishReason.STOP
            if ends and count == len(token_ids) and len(output) >= stop.min_tokens:
                return count, FinishReason.STOP
            if self.num_tokens >= self.max_num_tokens:
                return count, FinishReason.LENGTH
        return len(token_ids), None


class RequestUpdate(NamedTuple):
    """What a step gave to one request: the tokens that its output gained, and whether that ended it."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One per token, if the request asked for them."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the next prompt tokens. All updates together give those of the second token to the last."""
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: Exception | None = None
    """With `finish_reason` "error": why."""


_NULL_SLOT = (0,)
_UNKNOWN_TOKEN = (0,)


def make_row(
    request: Request, holding: Holding, count: int, num_drafts: int = 0, media: tuple[MediaUse, ...] = ()
) -> Row:
    """The row that computes the next `count` known tokens of `request` in the memory of `holding`, and up to
    `num_drafts` drafts behind them. `media` are the images that tokens of it stand for.

    Logits are wanted where the row samples, which is behind its last token and behind each draft, and where prompt
    log-probabilities are owed: of all positions from the first one owed to the row's end.
    """
    start = request.num_computed_tokens
    end = start + count
    samples = end == request.num_tokens
    num_logits = 1 + num_drafts if samples else 0
    if request.wants_prompt_logprobs and num_prompt_logprobs_owed(request, start, end) > 0:
        num_logits = end - max(start, request.num_prompt_logprobs)
    return Row(
        request.request_id,
        request.tokens(start, end),
        start,
        holding.block_table,
        holding.read_slot,
        holding.slots[: 1 + num_drafts] or _NULL_SLOT,
        holding.reserved,
        num_drafts,
        num_logits,
        samples,
        request.payload,
        request.rope,
        media,
        None,
        holding.pane_table,
    )


def make_row_ahead(request: Request, place: int, holding: Holding, slots: tuple[int, int]) -> Row:
    """The row that computes the token which row `place` of the step in flight samples for `request`, in the blocks and
    panes of `holding`. `slots` are the ones that it reads and writes."""
    return Row(
        request.request_id,
        _UNKNOWN_TOKEN,
        request.num_tokens,
        holding.block_table,
        slots[0],
        slots[1:],
        num_logits=1,
        samples=True,
        payload=request.payload,
        rope=request.rope,
        follows=place,
        pane_table=holding.pane_table,
    )


def is_decoding(request: Request) -> bool:
    """At least one token is computed, and exactly one is not; also where that one is the last of a prompt."""
    return 0 < request.num_computed_tokens == request.num_tokens - 1


def num_prompt_logprobs_owed(request: Request, start: int, end: int) -> int:
    """How many prompt log-probabilities the positions `start` to `end - 1` must still give.

    Position p gives that of prompt token p + 1, so the prompt's last position gives none; those before
    `num_prompt_logprobs` were delivered before a preemption.
    """
    assert request.wants_prompt_logprobs, "nobody asked for them"
    return max(0, min(end, len(request.prompt_token_ids) - 1) - max(start, request.num_prompt_logprobs))


def check_result(request: Request, row: Row, result: RowResult) -> None:
    """Raise AssertionError if the runner's result is not one for this row."""
    id = row.request_id
    assert result.request_id == id, f"the result of request {result.request_id} stands where {id} is due"
    if result.error is not None:
        given = bool(result.token_ids or result.prompt_logprobs or result.logprobs)
        assert not given, f"request {id} gets a result from a row that ended with an error"
        return
    least, most = (1, 1 + result.num_drafts) if row.samples else (0, 0)
    assert least <= len(result.token_ids) <= most, (
        f"request {id} gets {len(result.token_ids)} tokens from a row with samples={row.samples} and "
        f"{result.num_drafts} drafts"
    )
    assert result.num_drafts <= row.num_drafts, f"request {id} got more drafts than it has room for"
    assert result.logprobs is None or len(result.logprobs) == len(result.token_ids), (
        f"request {id} gets {len(result.logprobs or ())} log-probabilities for {len(result.token_ids)} tokens"
    )
    owed = num_prompt_logprobs_owed(request, row.start, row.end) if request.wants_prompt_logprobs else 0
    assert len(result.prompt_logprobs) == owed, (
        f"request {id} gets {len(result.prompt_logprobs)} prompt log-probabilities instead of {owed}"
    )
