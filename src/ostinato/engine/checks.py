"""Checks of a request before the scheduler sees it."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from ostinato.errors import Remedy, RequestError


def check_salt(cache_salt: str | None) -> None:
    message = f"cache_salt {cache_salt!r} should be text that is not empty, or left out"
    if cache_salt is not None and not (isinstance(cache_salt, str) and cache_salt):
        raise RequestError(message)
    try:
        (cache_salt or "").encode()  # as the prefix index hashes it
    except UnicodeEncodeError as error:
        raise RequestError(f"{message}: it cannot be encoded in UTF-8 ({error.reason})") from None


def check_priority(priority: int, scheduling_policy: str) -> None:
    if not isinstance(priority, int):
        raise RequestError(f"priority {priority!r} should be a whole number; lower ones come first")
    if priority != 0 and scheduling_policy == "fcfs":
        message = f"priority {priority} has no effect under scheduling_policy fcfs; choose the policy priority"
        raise RequestError(message, [Remedy("scheduling_policy", "priority")])


def as_token_ids(prompt: Sequence[int]) -> list[int]:
    """Return the token ids of a prompt that is not text."""
    if isinstance(prompt, bytes):  # its items are integers, but no token ids
        raise RequestError("a prompt is text or a list of token ids, not bytes; decode it first")
    try:
        return [operator.index(token) for token in prompt]
    except TypeError as error:
        raise RequestError(f"a prompt is text or a list of token ids, which are integers: {error}") from None


def check_token_range(token_ids: Sequence[int], vocab_size: int) -> None:
    outside = [token for token in token_ids if not 0 <= token < vocab_size]
    if outside:
        raise RequestError(
            f"the prompt holds token ids outside the model's vocabulary, such as {outside[0]}; "
            f"they must be from 0 to {vocab_size - 1}"
        )


def check_length(prompt: str | Sequence[int], max_model_len: int, longest_token: int) -> None:
    """Refuse at once a prompt that is too long in any case, since tokenizing it first may take seconds.

    No token has more than `longest_token` characters.
    """
    most = max_model_len * longest_token if isinstance(prompt, str) else max_model_len
    if len(prompt) > most:
        unit = "characters" if isinstance(prompt, str) else "tokens"
        raise RequestError(
            f"the prompt has {len(prompt)} {unit}, and max_model_len ({max_model_len}) has room for at most {most}"
        )
