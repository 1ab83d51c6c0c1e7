"""A request: its tokens, how many of them are computed, when it ends, and its row in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple

from ostinato.kv_cache.checkpoints import CheckpointPositions
from ostinato.kv_cache.marks import Mark
from ostinato.kv_cache.prefix_index import BlockHashes, CacheReport, MediaSpan
from ostinato.kv_cache.request_cache import KVSnapshot, RequestCache
from ostinato.scheduler.batch import BatchRow, MediaUse, RowResult, TokenLogprobs

CONTEXT_END = "max_model_len"
"""Stop reason of an output that `max_model_len` ended before it had `max_tokens` tokens."""


class FinishReason(StrEnum):
    """Reasons for the end of a request."""

    STOP = "stop"
    """A stop token, an end-of-sequence token or a stop string."""
    LENGTH = "length"
    """`max_tokens` tokens were generated, or the request reached `max_model_len` (`CONTEXT_END` says so)."""
    ABORT = "abort"
    MOVED = "moved"
    """Another engine continues it."""
    ERROR = "error"
    """The step that computed it failed, or the step's result for it alone."""


class RequestStatus(StrEnum):
    WAITING = "waiting"
    """The request holds no memory; it has not begun, or was preempted."""
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class StopConditions:
    """Conditions on token ids that end a request's output.

    A stop token counts only once `min_tokens` tokens, itself among them, have been generated. `ignore_eos` concerns
    `eos_token_ids` alone.
    """

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    stop_ids: frozenset[int] = field(init=False, repr=False, compare=False)
    """All tokens that end the output."""

    def __post_init__(self) -> None:
        eos = frozenset() if self.ignore_eos else self.eos_token_ids
        object.__setattr__(self, "stop_ids", self.stop_token_ids | eos)


@dataclass(slots=True, eq=False)
class Request:
    """One sequence to be continued. The caller sets the fields up to `kv_snapshot`; the scheduler owns the rest.

    For a request that comes from another engine, the caller also sets what that one knew: see `restore`.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    stop: StopConditions
    priority: int = 0
    """Service priority, lower first, if the scheduler's policy is `priority`."""
    wants_prompt_logprobs: bool = False
    sampling_state: Any = None
    """Sampling state that the runner needs beyond tokens and memory; it is part of the request's rows."""
    cache_salt: str | None = None
    """Salt of the block hashes: only requests of the same salt find each other's blocks."""
    media: Sequence[MediaSpan] = ()
    """The images that tokens of the prompt belong to, by position."""
    rope: Any = None
    """Positions for the rotary embedding, as in `BatchRow.rope`."""
    client: str | None = None
    """The client that sent it: clients get fair shares."""
    num_lookback_outputs: int = 0
    """Number of its outputs that are sampled depending on the ones before them, which must be known by then."""
    has_output: bool = True
    """False if only the prompt's hidden states are wanted: the one token after them is no output."""
    marks: Sequence[Mark] = ()
    """Positions of the prompt at which the application wants checkpoints."""
    arrival: float = 0.0
    """Moment of its arrival in seconds, by which pins of checkpoints end."""
    skips_prefix_cache: bool = False
    """True if each of its tokens is computed, also those that the prefix cache has."""
    was_imported: bool = False
    """True if another engine has computed some of it."""
    num_imported_tokens: int = 0
    """Tokens whose keys, values and state the other engine had at the export; 0 once they are here, or lost."""
    kv_snapshot: KVSnapshot | None = None
    """KV snapshot that came with it, until it is admitted."""

    output_token_ids: list[int] = field(default_factory=list)
    num_tokens: int = field(init=False)
    """All known tokens: the prompt and what was generated."""
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token or end-of-sequence token that ended the request, or `CONTEXT_END`."""
    num_computed_tokens: int = 0
    """Tokens whose keys, values and state are in the cache; back to 0 when the request is preempted."""
    num_prompt_logprobs: int = 0
    """Positions, from the first on, whose prompt log-probabilities were delivered; kept by a preemption."""
    num_preemptions: int = 0
    min_tokens_to_yield: int = 0
    """Length from which it may be preempted for a client below its share: twice that of the last time."""
    arrival_number: int = 0
    """Sequence number of the arrival, given by the scheduler."""
    service_order: tuple[int, float, int] = (0, 0, 0)
    """Unique order of service, lowest first: (priority or 0, start tag, arrival); a client's tags increase."""
    max_num_tokens: int = 0
    """Length of prompt and output at which the request ends with `length`."""
    block_hashes: BlockHashes | None = None
    """Block hashes of its full blocks; made by the first look into the index, if there is prefix caching."""
    checkpoint_positions: CheckpointPositions | None = None
    """The positions of its checkpoints, while it runs."""
    cache_report: CacheReport | None = None
    """Report of the prompt's prefix cache hit, once it was admitted."""

    def __post_init__(self) -> None:
        self.num_tokens = len(self.prompt_token_ids) + len(self.output_token_ids)

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Return the known tokens at positions `start` to `end - 1`; costs O(end - start)."""
        split = len(self.prompt_token_ids)
        if start >= split:
            return tuple(self.output_token_ids[start - split : end - split])
        if end <= split:
            return tuple(self.prompt_token_ids[start:end])
        return (*self.prompt_token_ids[start:], *self.output_token_ids[: end - split])

    def restore(self, token_ids: Sequence[int], num_prompt_logprobs: int, num_preemptions: int) -> None:
        """Add the outputs of another engine: tokens, and the number of positions with prompt log-probabilities."""
        self.output_token_ids += token_ids
        self.num_tokens += len(token_ids)
        self.num_prompt_logprobs, self.num_preemptions = num_prompt_logprobs, num_preemptions

    def update_cache_report(self) -> None:
        """Update the report after checkpoints were pinned, or their spacing has doubled, which a long output causes."""
        report, positions = self.cache_report, self.checkpoint_positions
        if report is None or positions is None:
            return
        if positions.pinned:
            self.cache_report = report = replace(report, marks=report.marks | dict.fromkeys(positions.pinned, True))
            positions.pinned.clear()
        if report.checkpoint_spacing is not None and positions.spacing > report.checkpoint_spacing:
            self.cache_report = replace(report, checkpoint_spacing=positions.spacing)

    def append_outputs(self, token_ids: Sequence[int], ends: bool = False) -> tuple[int, FinishReason | None]:
        """Append generated tokens up to the one that ends the request; with `ends`, the last of them does.

        Returns how many were appended, and why the request ends, if it does. Only its length ends it before
        `min_tokens`. A stop token is part of the output. If it is also the last token that the length allows, the
        reason is `stop`.
        """
        stop, output = self.stop, self.output_token_ids
        for count, token_id in enumerate(token_ids, start=1):
            output.append(token_id)
            self.num_tokens += 1
            if token_id in stop.stop_ids and len(output) >= stop.min_tokens:
                self.stop_reason = token_id
                return count, FinishReason.STOP
            if ends and count == len(token_ids) and len(output) >= stop.min_tokens:
                return count, FinishReason.STOP
            if self.num_tokens >= self.max_num_tokens:
                self.stop_reason = CONTEXT_END if len(output) < stop.max_tokens else None
                return count, FinishReason.LENGTH
        return len(token_ids), None


class RequestUpdate(NamedTuple):
    """Result of a step for one request: its output delta, and whether that ended it."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One per token, if the request asked for them."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of the next prompt tokens; over all updates, of the second token to the last."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: Exception | None = None
    """Cause, with `finish_reason` "error"."""


_NULL_SLOT = (0,)
_UNKNOWN_TOKEN = (0,)


def make_row(
    request: Request,
    request_cache: RequestCache,
    count: int,
    num_drafts: int = 0,
    media: tuple[MediaUse, ...] = (),
    sees_prompt: bool = False,
) -> BatchRow:
    """Return the row that computes the next `count` known tokens of `request` and `num_drafts` drafts after them.

    The row uses the memory of `request_cache`, and may get fewer drafts. `media` are the images that its tokens belong
    to. Its prompt's tokens see each other in both directions if it `sees_prompt`.

    Logits are needed where the row samples, which is after its last token and after each draft, and where prompt
    log-probabilities are owed: of all positions from the first one owed to the row's end.
    """
    start = request.num_computed_tokens
    end = start + count
    samples = end == request.num_tokens
    num_logits, num_scored = 1 + num_drafts if samples else 0, 0
    if request.wants_prompt_logprobs:
        num_scored = num_prompt_logprobs_due(request, start, end)
        if num_scored:
            num_logits = end - max(start, request.num_prompt_logprobs)
    return BatchRow(
        request.request_id,
        request.tokens(start, end),
        start,
        request_cache.block_table,
        request_cache.read_slot,
        request_cache.write_slots[: 1 + num_drafts] or _NULL_SLOT,
        request_cache.reserved_checkpoints,
        num_drafts,
        num_logits,
        samples,
        request.sampling_state,
        request.rope,
        media,
        None,
        request_cache.window_block_table,
        num_scored,
        len(request.prompt_token_ids) if sees_prompt else 0,
    )


def make_next_step_row(
    request: Request, row_index: int, request_cache: RequestCache, slots: tuple[int, int]
) -> BatchRow:
    """Return the row that computes the token which row `row_index` of the step in flight samples for `request`.

    It uses the blocks and window blocks of `request_cache`. `slots` are the ones that it reads and writes.
    """
    return BatchRow(
        request.request_id,
        _UNKNOWN_TOKEN,
        request.num_tokens,
        request_cache.block_table,
        slots[0],
        slots[1:],
        num_logits=1,
        samples=True,
        sampling_state=request.sampling_state,
        rope=request.rope,
        previous_row=row_index,
        window_block_table=request_cache.window_block_table,
    )


def is_decoding(request: Request) -> bool:
    """Return whether all tokens but the last, perhaps a prompt's, are computed, and at least one is."""
    return 0 < request.num_computed_tokens == request.num_tokens - 1


def num_prompt_logprobs_due(request: Request, start: int, end: int) -> int:
    """Return how many prompt log-probabilities the positions `start` to `end - 1` must still give.

    Position p gives that of prompt token p + 1, so the prompt's last position gives none; those before
    `num_prompt_logprobs` were delivered before a preemption.
    """
    assert request.wants_prompt_logprobs, "the request did not ask for them"
    return max(0, min(end, len(request.prompt_token_ids) - 1) - max(start, request.num_prompt_logprobs))


def check_result(request: Request, row: BatchRow, result: RowResult) -> None:
    """Raise AssertionError if the runner's result is not one for this row."""
    id = row.request_id
    assert result.request_id == id, f"the result of request {result.request_id} stands where {id} is due"
    if result.error is not None:
        has_result = bool(result.token_ids or result.prompt_logprobs or result.logprobs)
        assert not has_result, f"request {id} gets a result from a row that ended with an error"
        return
    min_tokens, max_tokens = (1, 1 + result.num_drafts) if row.samples else (0, 0)
    assert min_tokens <= len(result.token_ids) <= max_tokens, (
        f"request {id} gets {len(result.token_ids)} tokens from a row with samples={row.samples} and "
        f"{result.num_drafts} drafts"
    )
    assert result.num_drafts <= row.num_drafts, f"request {id} got more drafts than it has room for"
    assert result.logprobs is None or len(result.logprobs) == len(result.token_ids), (
        f"request {id} gets {len(result.logprobs or ())} log-probabilities for {len(result.token_ids)} tokens"
    )
    owed = num_prompt_logprobs_due(request, row.start, row.end) if request.wants_prompt_logprobs else 0
    assert len(result.prompt_logprobs) == owed, (
        f"request {id} gets {len(result.prompt_logprobs)} prompt log-probabilities instead of {owed}"
    )
