"""The limits that a scheduler keeps, and the requests that it refuses because of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ostinato.errors import ContextLengthError, Remedy, RequestError
from ostinato.kv_cache.encoder_cache import EncoderCache
from ostinato.kv_cache.manager import CacheManager
from ostinato.scheduler.request import Request

SchedulingPolicy = Literal["fcfs", "priority"]


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits of a step. All values come from the plan."""

    max_num_seqs: int
    """Requests that run at the same time, and so rows of a step."""
    max_num_batched_tokens: int
    """Tokens of a step. Activations were planned for this many: no step exceeds it."""
    max_model_len: int
    """Tokens of a request, prompt and output together."""
    enable_chunked_prefill: bool = True
    policy: SchedulingPolicy = "fcfs"
    max_item_tokens: int = 0
    """Most tokens of an image, for models that have an encoder: activations were planned for this many at once."""
    whole_images: bool = False
    """True if a step computes all tokens of an image, since they see each other in both directions."""
    whole_prompts: bool = False
    """True if a step computes all tokens of a prompt, since they see each other in both directions."""
    graph_tokens: int = 0
    """The largest step that has a graph of its own size, where `max_num_batched_tokens` has none; 0: no preference."""
    scored_tokens: int = 2**63
    """Prompt tokens that a step scores if other requests decode in it: each of these waits for all of the scores."""


def scored_tokens(vocab_size: int) -> int:
    """Return how many prompt tokens a step beside decoding requests scores: some ten milliseconds of work.

    Their cost is that of the logits and their order in large vocabularies, and that of the answer in small ones.
    """
    return max(32, min(256, 2**22 // vocab_size))


def max_total_tokens(request: Request, limits: SchedulerLimits) -> int:
    """Return the number of tokens, prompt and output together, at which `request` ends in any case.

    The token that ends a request without output is not counted among those of `max_model_len`.
    """
    longest = limits.max_model_len + (not request.has_output)
    return min(len(request.prompt_token_ids) + request.stop.max_tokens, longest)


def check_prompt_length(
    num_tokens: int,
    max_model_len: int,
    setting: str | None = None,
    *,
    has_output: bool = True,
    longest_token: int | None = None,
) -> None:
    """Raise ContextLengthError, which names `setting`, for a prompt that is too long.

    With `longest_token`, a number of characters, `num_tokens` are the characters of a text that is not tokenized yet,
    which may take seconds: it is refused if it is too long in any case.
    """
    count, most = -(-num_tokens // (longest_token or 1)), max_model_len - has_output
    if count > most:
        left = ", of which one must be left for the output" if has_output else ""
        error = ContextLengthError(
            f"the request has a prompt of {'at least ' if longest_token else ''}{count} tokens, and max_model_len is "
            f"{max_model_len}{left}; shorten the prompt to {most} tokens",
            setting=setting,
        )
        error.num_tokens, error.is_counted = count, longest_token is None
        error.max_tokens, error.max_model_len = most, max_model_len
        raise error


def check_servable(
    request: Request, limits: SchedulerLimits, cache: CacheManager, encoder_cache: EncoderCache | None = None
) -> None:
    """Raise RequestError, which says what to change, if `request` could never be served to its end.

    The message does not contain the engine's request id, which clients of a server do not know.

    A prompt must leave room for one token of output, so it has at most `max_model_len - 1`; `max_model_len` if it has
    no output. The last token of an output is never computed, so a request needs memory for one token less than its
    length.
    """
    num_prompt = len(request.prompt_token_ids)
    if num_prompt == 0:
        raise RequestError("the request has an empty prompt; give at least one token, such as the BOS token")
    if request.stop.max_tokens < 1:
        raise RequestError(
            f"the request asks for {request.stop.max_tokens} tokens; max_tokens must be at least 1",
            [Remedy("max_tokens", 1)],
        )
    check_prompt_length(num_prompt, limits.max_model_len, has_output=request.has_output)
    if not limits.enable_chunked_prefill and num_prompt > limits.max_num_batched_tokens:
        why = "whose tokens see each other, so that it" if limits.whole_prompts else "which without chunked prefill"
        remedy = Remedy("enable_chunked_prefill", True)
        advice = "turn enable_chunked_prefill on"
        if limits.whole_prompts:
            remedy = Remedy("max_num_batched_tokens", num_prompt)
            advice = f"raise max_num_batched_tokens to {num_prompt}"
        raise RequestError(
            f"the request has a prompt of {num_prompt} tokens, {why} must be computed "
            f"in one step of {limits.max_num_batched_tokens} (max_num_batched_tokens); shorten it, or {advice}",
            [remedy],
        )
    max_computed = cache.max_request_tokens()
    if max_total_tokens(request, limits) - 1 > max_computed:
        max_tokens = max_computed + 1 - num_prompt
        advice = f"lower max_tokens to at most {max_tokens}" if max_tokens >= 1 else "shorten the prompt"
        raise RequestError(
            f"the request may grow to {max_total_tokens(request, limits)} tokens ({num_prompt} of prompt and up to "
            f"{request.stop.max_tokens} of output), and the whole cache serves at most "
            f"{max_computed + 1 if max_computed else 0}; {advice}, or give the cache more memory",
            [Remedy("max_tokens", max_tokens)] if max_tokens >= 1 else [],
        )
    if request.media:
        assert encoder_cache is not None, "images came to a model that has no encoder"
        _check_media(request, limits, encoder_cache.capacity)


def _check_media(request: Request, limits: SchedulerLimits, num_cells: int) -> None:
    """Raise RequestError unless each image can be encoded and kept, and all at once if the prompt is one step."""
    assert list(request.media) == sorted(request.media, key=lambda span: span.start), "images are not in order"
    largest = max(span.end - span.start for span in request.media)
    if request.media[-1].end >= len(request.prompt_token_ids):
        raise RequestError(
            "the request has a prompt that ends with an image; let text follow it, such as the image's end"
        )
    if largest > limits.max_item_tokens:
        raise RequestError(
            f"the request has an image of {largest} tokens, and at most {limits.max_item_tokens} are encoded at once "
            f"(max_num_batched_tokens); make the image smaller, or raise max_num_batched_tokens to {largest}",
            [Remedy("max_num_batched_tokens", largest)],
        )
    if largest > num_cells:
        raise RequestError(
            f"the request has an image of {largest} tokens, and the encoder cache holds {num_cells}; make the image "
            f"smaller, or raise encoder_cache_tokens to {largest}",
            [Remedy("encoder_cache_tokens", largest)],
        )
    together = sum({span.digest: span.end - span.start for span in request.media}.values())
    if not limits.enable_chunked_prefill and together > num_cells:
        raise RequestError(
            f"the request has images of {together} tokens together, which without chunked prefill are needed in one "
            f"step, and the encoder cache holds {num_cells}; raise encoder_cache_tokens to {together}, or turn "
            "enable_chunked_prefill on",
            [Remedy("encoder_cache_tokens", together), Remedy("enable_chunked_prefill", True)],
        )
