"""API keys of clients, each with a name, and the identity of a client."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

from ostinato.errors import ConfigError
from ostinato.files import is_stream
from ostinato.scheduler.request_queues import Client
from ostinato.serve.http.api_errors import ApiError
from ostinato.serve.http.api_key_file import ApiKey, read_keys
from ostinato.serve.settings import ServeSettings

log = logging.getLogger("ostinato.serve")


class ApiKeys:
    """API keys of clients. Only digests are kept, and all of them are compared, always."""

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._digests: Sequence[tuple[str, bytes]] = ()
        self.weights: Mapping[str, int] = {}
        """Weights of all keys, by name."""
        self._see_all: frozenset[str] = frozenset()
        self._use(settings.keys)

    def reload(self) -> None:
        """Read the file of keys again. If it is broken, the keys stay, and the log says why."""
        path = self._settings.api_key_file
        if path is None:
            log.info("there is no api_key_file to read again")
            return
        if is_stream(path):
            log.error("the keys stay as they were: api_key_file %s is a pipe or a device, which is read once", path)
            return
        try:
            self._use(read_keys(self._settings.api_key, path))
        except ConfigError as error:
            log.error("the keys stay as they were: %s", error.message)
        else:
            log.info("api_key_file was read again: there are %d keys", len(self._digests))

    def check(self, authorization: str | None, x_api_key: str | None = None) -> str | None:
        """Return the name of the key in the headers, or None if the server has no keys.

        The key is in `Authorization`, or without that in `x-api-key`, as Anthropic's clients send it. ApiError 401
        without a valid key.
        """
        if not self._digests:
            return None
        if authorization is None and x_api_key is not None:
            authorization = f"Bearer {x_api_key}"
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip().encode("utf-8", "replace"))
        found = None
        for name, known in self._digests:
            if hmac.compare_digest(given, known):
                found = name
        if found is None or scheme.lower() != "bearer":
            if authorization is None:
                message = "this server needs a key: send the header Authorization: Bearer KEY, or x-api-key: KEY"
            elif scheme.lower() != "bearer":
                message = "the header Authorization should be Bearer KEY"
            else:
                message = "this key is not one of the server's"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return found

    def seen_by(self, authorization: str | None, x_api_key: str | None = None) -> Collection[str]:
        """Return the names of the keys that `/metrics` shows to a client.

        None without a key; else the client's own, or all if its line in the file says so. ApiError 401 for an unknown
        key.
        """
        if authorization is None and x_api_key is None:
            return ()
        name = self.check(authorization, x_api_key)
        if name is None:
            return ()
        return self.weights.keys() if name in self._see_all else (name,)

    def _use(self, keys: Mapping[str, ApiKey]) -> None:
        self._digests = tuple((name, _digest(key.key.encode())) for name, key in keys.items())
        self.weights = {name: key.weight for name, key in keys.items()}
        self._see_all = frozenset(name for name, key in keys.items() if key.sees_all)


@lru_cache(maxsize=1024)
def client_of(name: str | None, address: str | None, weight: int = 1) -> Client:
    """Return the client for fair shares of the server: by its key's name and weight, or else by its address.

    IPv6 addresses count by their first 64 bits, since one customer of a network usually has all of these.
    """
    if name is not None:
        return Client(f"key {name}", weight)
    try:
        parsed = ipaddress.ip_address((address or "").partition("%")[0])
    except ValueError:
        return Client(f"address {address or 'unknown'}")
    if parsed.version == 6 and not parsed.is_loopback:
        return Client(f"address {ipaddress.ip_network((parsed, 64), strict=False)}")
    return Client(f"address {parsed}")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
