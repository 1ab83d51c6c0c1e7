"""What the OpenAPI document says of errors; endpoints describe their own answers."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    """The field of the request that it is about."""
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail


def _described(description: str, **more: Any) -> dict[str, Any]:
    return {"model": ErrorBody, "description": description, **more}


READING: dict[int | str, dict[str, Any]] = {
    "4XX": _described("The request cannot be served as it is: what is wrong, and the field that it is about."),
    401: _described("The Authorization header has none of the server's keys."),
    503: _described("The model is being loaded, or the server ends."),
}
"""Errors of endpoints that tell something."""

_RETRY = {"Retry-After": {"description": "Seconds until there is likely to be room.", "schema": {"type": "integer"}}}

GENERATING: dict[int | str, dict[str, Any]] = {
    **READING,
    413: _described("The body is larger than the server takes."),
    429: _described("The queue is full.", headers=_RETRY),
    500: _described("The server failed to compute the request."),
    504: _described("The request did not end within its `timeout`, or the server's."),
}
"""Errors of endpoints that compute."""
