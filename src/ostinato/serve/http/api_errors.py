"""Errors in the clients' form: OpenAI's, with a status; and their description in the OpenAPI document."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ostinato.errors import (
    BacklogExceeded,
    ContextLengthError,
    DeadlineExceeded,
    EngineFailed,
    EngineStopped,
    OstinatoError,
    Overloaded,
    ReplicaLost,
    RequestError,
)
from ostinato.json_io import JsonObject
from ostinato.observe.request_record import RequestRecord

MAX_MESSAGE = 1000
"""Largest number of characters of a message to a client."""

MAX_LOGGED = 200
"""Largest number of characters of a field's name in the log."""

_TYPES = {
    **dict.fromkeys((400, 404, 405, 413, 415, 417, 421, 431, 501, 505), "invalid_request_error"),
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    409: "conflict_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_ANTHROPIC_TYPES = {**_TYPES, 404: "not_found_error", 413: "request_too_large", 503: "overloaded_error"}


NO_THREADS = "thread_unsupported_request"
"""Code after which Anthropic's clients go on without a thread: they look for it in the error's `details`."""

Dialect = Literal["openai", "anthropic", "ollama"]
"""The API whose form an endpoint's requests, answers and errors have."""


class ApiError(Exception):
    """Error that ends a request: an HTTP status, and the fields of OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        anthropic: str | None = None,
    ) -> None:
        """Make the error. `anthropic` is the whole message in Anthropic's dialect, if it has another one there."""
        super().__init__(message)
        # A message may repeat what the client sent, which may be long.
        self.message = message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]} ..."
        self.status, self.param, self.code = status, param and param[:MAX_MESSAGE], code
        self.headers, self.anthropic = dict(headers or {}), anthropic

    def __reduce__(self) -> tuple[object, ...]:
        return _error, (self.status, self.message, self.param, self.code, self.headers, self.anthropic)

    def renamed(self, place: str, own: str) -> ApiError:
        """Return the error with the place that the client knows, `own`, for one that was made of it."""
        message, param = self.message.replace(place, own), (self.param or "").replace(place, own)
        return ApiError(self.status, message, param=param or None, code=self.code, headers=self.headers)

    def body(self) -> JsonObject:
        """Return `{"error": {...}}`: the body of a response, or the data of an event in a stream."""
        kind = _TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, dialect: Dialect = "openai") -> Response:
        """Return the whole response, in the form of an endpoint's dialect."""
        return _ErrorResponse(self, dialect)

    def event(self, dialect: Dialect) -> bytes:
        """Return the event that reports the error in a stream of this dialect."""
        if dialect == "ollama":
            return f"{self.json(dialect)}\n".encode()
        name = "event: error\n" if dialect == "anthropic" else ""
        return f"{name}data: {self.json(dialect)}\n\n".encode()

    def json(self, dialect: Dialect) -> str:
        """Return the body in a dialect's form."""
        # ASCII, since the message may repeat text of the client that cannot be encoded.
        if dialect == "ollama":
            return json.dumps({"error": self.message})
        return json.dumps(self._anthropic() if dialect == "anthropic" else self.body())

    def _anthropic(self) -> JsonObject:
        """Return the error in Anthropic's form, which has the field in its message."""
        message = self.anthropic or self.message
        if self.anthropic is None and self.param is not None and self.param not in message:
            message = f"{self.param}: {message}"
        error: JsonObject = {"type": _ANTHROPIC_TYPES.get(self.status, "api_error"), "message": message}
        if self.code == NO_THREADS:
            error["details"] = {"error_code": self.code, "unsupported": [self.param]}
        return {"type": "error", "error": error}


def field_error(param: str, problem: str) -> ApiError:
    """Return the error of a field, whose name the message begins with."""
    return ApiError(400, f"{param} {problem}", param=param)


def check_count(param: str, what: str, count: int, most: int, setting: str = "") -> None:
    """Raise the error of a field that has more of something than a request may have, by a setting or in any case."""
    if count > most:
        by = f" ({setting})" if setting else ""
        raise ApiError(400, f"{param}: {count} {what} are given, and a request may have {most}{by}", param=param)


class _ErrorResponse(Response):
    """Response that notes its error in the request's record, for the log."""

    def __init__(self, error: ApiError, dialect: Dialect) -> None:
        super().__init__(error.json(dialect), error.status, error.headers, "application/json")
        # Not the error itself: its traceback leads to this response, and a circle would keep the request's body.
        self._code, self._param = error.code, error.param

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record: RequestRecord | None = scope["state"].get("record")
        if record is not None:
            record.code = self._code
            # The client's text may hold line breaks.
            record.param = self._param and self._param.encode("unicode_escape").decode()[:MAX_LOGGED]
        await super().__call__(scope, receive, send)


def _error(
    status: int, message: str, param: str | None, code: str | None, headers: dict[str, str], anthropic: str | None
) -> ApiError:
    return ApiError(status, message, param=param, code=code, headers=headers, anthropic=anthropic)


def _context_exceeded(error: ContextLengthError) -> ApiError:
    """Return the error in the words that clients look for, in both dialects."""
    prompt, most, at_least = error.setting or "prompt", error.max_tokens, "" if error.is_counted else "at least "
    message = (
        f"This model's maximum context length is {error.max_model_len} tokens. However, your {prompt} resulted in "
        f"{at_least}{error.num_tokens} tokens. Please reduce the length of the {prompt} to {most} tokens"
        f"{', since one is left for the output' if most < error.max_model_len else ''}."
    )
    anthropic = f"prompt is too long: {error.num_tokens} tokens > {most} maximum{at_least and ' (it has more)'}"
    return ApiError(400, message, param=prompt, code="context_length_exceeded", anthropic=anthropic)


def as_api_error(error: BaseException) -> ApiError:
    """Return an error as its client sees it: without details if the client did not cause it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Overloaded):
        headers = {"Retry-After": str(error.retry_after)}
        return ApiError(429, error.message, code="queue_full", headers=headers)
    if isinstance(error, DeadlineExceeded):
        return ApiError(504, error.message, param="timeout", code="deadline_exceeded")
    if isinstance(error, BacklogExceeded):
        return ApiError(400, error.message, code="client_backlog")
    if isinstance(error, ContextLengthError):
        return _context_exceeded(error)
    if isinstance(error, RequestError):
        return ApiError(400, error.message, param=error.setting)
    if isinstance(error, ReplicaLost):
        return ApiError(503, str(error), code="replica_lost", headers={"Retry-After": "1"})
    if isinstance(error, EngineStopped):
        return ApiError(503, "the server is shutting down, and ended the request", code="draining")
    if isinstance(error, EngineFailed):
        return ApiError(503, "the engine has failed, and the server is shutting down", code="engine_failed")
    # The error's text may name the server's files or other requests, so it goes only to the log.
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


def _described(description: str, **more: object) -> JsonObject:
    return {"model": ErrorBody, "description": description, **more}


REPORT_ERRORS: dict[int | str, JsonObject] = {
    "4XX": _described("The request is wrong. The error says what, and names the field."),
    401: _described("The Authorization header holds none of the server's keys."),
    503: _described("The model is being loaded, or the server is shutting down."),
}
"""Errors of endpoints that only report."""

_RETRY = {"Retry-After": {"description": "Seconds until there is likely to be room.", "schema": {"type": "integer"}}}

MODEL_ERRORS: dict[int | str, JsonObject] = {
    **REPORT_ERRORS,
    413: _described("The body is larger than max_body."),
    429: _described("The queue is full.", headers=_RETRY),
    500: _described("The server failed to compute the request."),
    504: _described("The request did not end within its `timeout`, or the server's."),
}
"""Errors of endpoints that use the model."""
