"""Errors as clients see them: OpenAI's form, with a status."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

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
        # It may repeat what the client sent, which may be long.
        self.message = message if len(message) <= LONGEST_MESSAGE else f"{message[:LONGEST_MESSAGE]} ..."
        self.status, self.param, self.code = status, param and param[:LONGEST_MESSAGE], code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """`{"error": {...}}`, as the response's body and as an event of a stream."""
        kind = _TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The whole response."""
        # ASCII: what a client sent, and the message repeats, need not be text that can be encoded.
        body = json.dumps(self.body())
        return Response(body, self.status, headers=self.headers, media_type="application/json")


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
    if isinstance(error, EngineStopped):
        return ApiError(503, "the server ends, and the request did not end before", code="draining")
    if isinstance(error, EngineFailed):
        return ApiError(503, "the engine has failed and the server is about to end", code="engine_failed")
    # Neither the text of the error nor what led to it: both may tell of the server's files, or of others' requests.
    code = type(error).__name__ if isinstance(error, OstinatoError) else "internal_error"
    return ApiError(500, "the server failed to compute this request; its log says more", code=code)


def from_validation(errors: Sequence[Mapping[str, Any]], body: Any, content_type: str) -> ApiError:
    """What pydantic found wrong with a body, as the error of one field.

    The deepest field is named: of a union's alternatives it is where the one that was meant went wrong.
    """
    first = errors[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    if tuple(first["loc"]) == ("body",):
        return _of_the_whole(first["type"], content_type)
    paths = [_path_in(body, detail["loc"], detail["type"]) for detail in errors]
    path = max(paths, key=len)
    found = [detail for detail, each in zip(errors, paths, strict=True) if each == path]
    param = path_text(path)
    if found[0]["type"] == "extra_forbidden":
        return ApiError(400, f"unknown parameter: {param}", param=param, code="unknown_parameter")
    messages = dict.fromkeys(detail["msg"].removeprefix("Value error, ") for detail in found)
    message = ", or: ".join(messages)
    return ApiError(400, f"{param}: {message}" if param else message, param=param or None)


def path_text(path: Sequence[str | int]) -> str:
    """`messages[0].role`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _of_the_whole(kind: str, content_type: str) -> ApiError:
    if kind == "missing":
        return ApiError(400, "the request has no body; it should be a JSON object")
    if kind == "string_unicode":
        return ApiError(400, "the name of a field is not valid Unicode")
    if "json" not in content_type.lower():
        given = f"not {content_type}" if content_type else "and there is none"
        message = f"the body should be JSON, sent with the header Content-Type: application/json, {given}"
        return ApiError(415, message, code="unsupported_media_type")
    return ApiError(400, "the body should be a JSON object")


def _path_in(body: Any, where: Sequence[str | int], kind: str) -> list[str | int]:
    """The part of an error's path that is the body's own; the rest are names of types that pydantic tried."""
    path: list[str | int] = []
    value = body
    parts = list(where[1:] if where and where[0] in ("body", "query", "path") else where)
    for place, part in enumerate(parts):
        is_missing = kind == "missing" and place == len(parts) - 1
        if isinstance(value, dict) and isinstance(part, str) and (part in value or is_missing):
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            continue
        path.append(part)
    return path
