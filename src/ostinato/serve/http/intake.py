"""Reading a request's body: no more than is allowed, no longer than it may take, and not nested too deep."""

from __future__ import annotations

import asyncio

import pydantic_core
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from ostinato.serve.http.errors import ApiError

SECONDS = 60.0
"""For a whole body to arrive."""
_SHALLOW = 64
"""A body with no more brackets than this is not looked into: nothing nests deeper."""


async def read_body(headers: Headers, receive: Receive, limit: int) -> bytes:
    """The whole body. ApiError for one that is larger than `limit` bytes, comes too slowly, or is JSON nested more than
    some 200 deep; ClientDisconnect if it ends early."""
    declared = headers.get("content-length", "0")
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > limit):
        raise _too_large(limit)
    parts: list[bytes] = []
    received = 0
    try:
        async with asyncio.timeout(SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                part = message.get("body", b"")
                received += len(part)
                if received > limit:
                    raise _too_large(limit)
                parts.append(part)
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {SECONDS:g} seconds", code="body_timeout") from None
    body = b"".join(parts)
    _check_depth(body)
    return body


def replayed(body: bytes, receive: Receive) -> Receive:
    """`receive` of a request whose body was read: gives it once more, and then what comes after it."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return messages.pop() if messages else await receive()

    return again


def _check_depth(body: bytes) -> None:
    if body.count(b"[") + body.count(b"{") <= _SHALLOW:
        return
    try:
        pydantic_core.from_json(body, cache_strings="none")  # whose own limit it is; what else is wrong is told later
    except ValueError as error:
        if "recursion" in str(error):
            raise ApiError(400, "the body is nested too deep", code="nested_too_deep") from None


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes (max_body)", code="body_too_large")
