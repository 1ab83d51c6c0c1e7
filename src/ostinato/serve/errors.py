"""Errors as clients see them: OpenAI's form, with a status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse

from ostinato.engine.admission import Overloaded
from ostinato.engine.async_engine import EngineFailed
from ostinato.engine.stream import DeadlineExceeded
from ostinato.errors import OstinatoError, RequestError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """A request that ends with an error: its HTTP status, and what OpenAI's error object holds."""

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
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """`{"error": {...}}`, as the response's body and as an event of a stream."""
        kind = _TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The whole response."""
        return JSONResponse(self.body(), self.status, headers=self.headers)


def as_api_error(error: BaseException) -> ApiError:
    """What a client is told of an error. Of one that is not its own doing, no more than that it happened."""
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
    if isinstance(error, EngineFailed):
        return ApiError(503, "the engine has failed and the server is about to end", code="engine_failed")
    if isinstance(error, OstinatoError):
        return ApiError(500, error.message, code=type(error).__name__)
    return ApiError(500, "the server met an internal error while it computed this request; its log says more")


def from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first of pydantic's errors about a body."""
    detail = errors[0]
    where = [part for part in detail["loc"] if part not in ("body", "query", "path")]
    if detail["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {detail.get('ctx', {}).get('error', detail['msg'])}")
    param = _path(where)
    if detail["type"] == "extra_forbidden":
        return ApiError(400, f"unknown parameter: {param}", param=param, code="unknown_parameter")
    message = detail["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{param}: {message}" if param else message, param=param or None)


def _path(parts: Sequence[str | int]) -> str:
    """`messages[0].role`."""
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
