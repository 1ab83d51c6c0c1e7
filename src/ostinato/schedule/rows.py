"""From a request to its row in a step, and what that row's result must hold."""

from __future__ import annotations

from ostinato.cache.holding import Holding
from ostinato.schedule.batch import MediaUse, Row, RowResult
from ostinato.schedule.request import Request

_NULL_SLOT = (0,)


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
    if num_prompt_logprobs_owed(request, start, end) > 0:
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
    )


def is_decoding(request: Request) -> bool:
    """At least one token is computed, and exactly one is not; also where that one is the last of a prompt."""
    return 0 < request.num_computed_tokens == request.num_tokens - 1


def num_prompt_logprobs_owed(request: Request, start: int, end: int) -> int:
    """How many prompt log-probabilities the positions `start` to `end - 1` must still give.

    Position p gives that of prompt token p + 1, so the prompt's last position gives none; those before
    `num_prompt_logprobs` were delivered before a preemption.
    """
    if not request.wants_prompt_logprobs:
        return 0
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
    owed = num_prompt_logprobs_owed(request, row.start, row.end)
    assert len(result.prompt_logprobs) == owed, (
        f"request {id} gets {len(result.prompt_logprobs)} prompt log-probabilities instead of {owed}"
    )
