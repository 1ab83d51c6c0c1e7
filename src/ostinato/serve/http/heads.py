"""The head of a request: its errors, its wishes for the connection, and its part of the ASGI scope."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote_to_bytes

import httptools

from ostinato.serve.http.errors import ApiError

HeaderList = Sequence[tuple[bytes, bytes]]
"""Headers of a request: names in lower case, and values."""

_HOST = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~%!$&'()*+,;=-]*)(:[0-9]*)?")


def head_error(method: bytes, url: bytes, version: str, headers: HeaderList) -> ApiError | None:
    """Return why the request is refused before any application sees it, or None."""
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1:
        return ApiError(400, "the request has more than one Host header; send one", code="bad_host")
    if not hosts and version != "1.0":
        return ApiError(400, "the request has no Host header, which HTTP/1.1 asks for", code="bad_host")
    if hosts and not _HOST.fullmatch(hosts[0]):
        return ApiError(400, "the Host header is not a host's name or address, and perhaps a port", code="bad_host")
    if method == b"CONNECT":
        return ApiError(400, "CONNECT is not served: this is no proxy", code="bad_request")
    try:
        httptools.parse_url(url)
    except httptools.HttpParserInvalidURLError:
        return ApiError(400, "the request's path is not valid", code="bad_request")
    return None


def scope_of(method: bytes, url: bytes, version: str, headers: HeaderList, root_path: str) -> dict[str, Any]:
    """Return the part of the ASGI scope that comes from the head. `headers` are passed on unchanged."""
    parsed = httptools.parse_url(url)
    path = parsed.path or b"/"
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": version,
        "method": method.decode("ascii"),
        "root_path": root_path,
        "path": root_path + unquote_to_bytes(path).decode("utf-8", "replace"),
        "raw_path": root_path.encode() + path,
        "query_string": parsed.query or b"",
        "headers": headers,
    }


def connection_options(version: str, headers: HeaderList) -> tuple[bool, bool]:
    """Return whether the client would send further requests, and whether it waits before it sends the body."""
    words = b",".join(value for name, value in headers if name == b"connection").lower()
    if version == "1.0":
        return b"keep-alive" in words, False
    waits = any(name == b"expect" and value.lower() == b"100-continue" for name, value in headers)
    return b"close" not in words, waits


def framing_of(headers: HeaderList) -> bytes:
    """Return a head with the headers that describe the body, and no others."""
    framing = [(name, value) for name, value in headers if name in (b"content-length", b"transfer-encoding")]
    return b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(b"%b: %b\r\n" % each for each in framing)
