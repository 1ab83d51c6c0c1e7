"""A request on its way: its tokens, how many of them are computed, and when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from ostinato.cache.chain import Chain, MediaSpan
from ostinato.cache.placement import Placement
from ostinato.cache.report import CacheReport
from ostinato.schedule.batch import TokenLogprobs


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """A stop token, an end-of-sequence token or a stop string."""
    LENGTH = "length"
    """`max_tokens` tokens were generated, or the request reached `max_model_len`."""
    ABORT = "abort"
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

    def stops(self, token_id: int) -> bool:
        return token_id in self.stop_token_ids or (token_id in self.eos_token_ids and not self.ignore_eos)


@dataclass(slots=True, eq=False)
class Request:
    """One sequence to be continued. The caller gives the first nine fields; the scheduler owns the rest."""

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
    rank: tuple[int, int] = (0, 0)
    """Order of service, lowest first: (priority or 0, arrival). Unique."""
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
            if stop.stops(token_id) and len(output) >= stop.min_tokens:
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
