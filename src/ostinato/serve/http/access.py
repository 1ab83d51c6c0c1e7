"""Who may ask: the keys, what is open without one, and the names by which a server of this machine alone is called."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from ostinato.serve.http.errors import ApiError
from ostinato.serve.settings import is_loopback

OPEN_PATHS = frozenset({"/", "/health", "/version", "/metrics"})
"""What is answered without a key, besides the page's own files."""
PAGE = "/page/"


class Keys:
    """The keys that clients may have. Only their digests are kept, so that comparing takes the same time for any."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def check(self, path: str, authorization: str | None) -> None:
        """ApiError 401 unless the header has one of the keys, there is none to have, or the path is open."""
        if not self._digests or path in OPEN_PATHS or path.startswith(PAGE):
            return
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip().encode("utf-8", "replace"))
        matches = [hmac.compare_digest(given, known) for known in self._digests]  # all of them, always
        if not (scheme.lower() == "bearer" and any(matches)):
            message = "the Authorization header should be 'Bearer' and one of the server's keys"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def check_host(host: str | None) -> None:
    """ApiError 421 if a server that listens on a loopback address, without keys, is called by another name.

    A web page can have its own name point at this machine and so read what only this machine's users may; the browser
    then sends that name. Clients that send none are no browsers.
    """
    name = _without_port(host or "localhost")
    if not is_loopback(name):
        message = (
            "this server is for its own machine, as localhost or 127.0.0.1, and was called by another name; to serve "
            "others, start it with an api_key"
        )
        raise ApiError(421, message, code="foreign_host")


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
