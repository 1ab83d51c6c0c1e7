"""Prompts as text or token ids, one or several."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator

from ostinato.serve.http.errors import ApiError
from ostinato.serve.work.context import RequestContext


def _checked(value: Any) -> Any:
    """Check a prompt, so that a wrong one gets one message, not one for each form that a prompt may have."""
    if isinstance(value, str) or _are_token_ids(value):
        return value
    if isinstance(value, list) and all(isinstance(each, str) or _are_token_ids(each) for each in value):
        return value
    raise ValueError("a prompt is text or a list of token ids, and several are a list of these")


def _are_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int for each in value)


Prompts = Annotated[str | list[int] | list[str | list[int]], BeforeValidator(_checked)]
"""The field of a body."""


def prompts_in(value: Any, param: str) -> list[str | list[int]]:
    """Return each prompt of the field `param`, as text or token ids. ApiError if there is none."""
    if isinstance(value, str):
        return [value]
    if not value:
        raise ApiError(400, f"{param} is an empty list; a prompt is text or token ids", param=param)
    return [value] if isinstance(value[0], int) else list(value)


def token_ids(work: RequestContext, prompt: str | list[int], param: str) -> list[int]:
    """Return the token ids of one prompt. ApiError, which names `param`, for tokens that the model cannot take."""
    if isinstance(prompt, str):
        ids = work.encode(prompt, True, param)
    else:
        work.text.check_ids(prompt, param)
        ids = prompt
    if not ids:
        message = f"{param}: a prompt is empty; give at least one token, such as the BOS token"
        raise ApiError(400, message, param=param)
    return ids
