"""Errors as clients see them: OpenAI's form, with a status; and what the OpenAPI document says of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from starlette.responses import Response

from ostinato.engine.process.admission import Overloaded
from ostinato.engine.process.failures import EngineFailed, EngineStopped
from ostinato.engine.process.stream import DeadlineExceeded
from ostinato.errors import OstinatoError, RequestError

LONGEST_MESSAGE = 1000
"""Characters of a message to a client."""

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    421: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """Ends a request with an error: an HTTP status, and the fields of OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        # A message may repeat what the client sent, which may be long.
        self.message = message if len(message) <= LONGEST_MESSAGE else f"{message[:LONGEST_MESSAGE]} ..."
        self.status, self.param, self.code = status, param and param[:LONGEST_MESSAGE], code
        self.headers = dict(headers or {})

    def __reduce__(self) -> tuple[Any, ...]:
        return _error, (self.status, self.message, self.param, self.code, self.headers)

    def body(self) -> dict[str, Any]:
        """`{"error": {...}}`: the body of a response, or the data of an event in a stream."""
        kind = _TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The whole response."""
        # As ASCII: the message may repeat text of the client that cannot be encoded.
        body = json.dumps(self.body())
        return Response(body, self.status, headers=self.headers, media_type="application/json")


def _error(status: int, message: str, param: str | None, code: str | None, headers: dict[str, str]) -> ApiError:
    return ApiError(status, message, param=param, code=code, headers=headers)


def as_api_error(error: BaseException) -> ApiError:
    """What a client is told of an error. Of an error that it did not cause, it learns only that it happened."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Overloaded):
        headers = {"Retry-After": str(error.retry_after)}
        return ApiError(429, error.message, code="queue_full", headers=headers)
    if isinstance(error, DeadlineExceeded):
        return ApiError(504, error.message, param="timeout", code="deadline_exceeded")
    if isinstance(error, RequestError):
        setting = error.remedies[0].setting if error.remedies else None
        return ApiError(400, error.message, param=setting)
    if isinstance(error, EngineStopped):
        return ApiError(503, "the server is shutting down, and ended the request", code="draining")
    if isinstance(error, EngineFailed):
        return ApiError(503, "the engine has failed, and the server is shutting down", code="engine_failed")
    # The error's text may tell of the server's files or of other requests, so it goes to the log alone.
    code = type(error).__name__ if isinstance(error, OstinatoError) else "internal_error"
    return ApiError(500, "the server failed to compute this request; its log says more", code=code)


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    """The field of the request that is wrong."""
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail


def _described(description: str, **more: Any) -> dict[str, Any]:
    return {"model": ErrorBody, "description": description, **more}


REPORT_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": _described("The request is wrong. The error says what, and names the field."),
    401: _described("The Authorization header holds none of the server's keys."),
    503: _described("The model is being loaded, or the server is shutting down."),
}
"""Errors of endpoints that only report."""

_RETRY = {"Retry-After": {"description": "Seconds until there is likely to be room.", "schema": {"type": "integer"}}}

MODEL_ERRORS: dict[int | str, dict[str, Any]] = {
    **REPORT_ERRORS,
    413: _described("The body is larger than max_body."),
    429: _described("The queue is full.", headers=_RETRY),
    500: _described("The server failed to compute the request."),
    504: _described("The request did not end within its `timeout`, or the server's."),
}
"""Errors of endpoints that use the model."""
