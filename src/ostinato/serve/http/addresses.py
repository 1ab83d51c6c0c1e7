"""Addresses: those to listen on, and those of clients behind trusted proxies (X-Forwarded-For).

An address to listen on is a text; other machines can reach it or not.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

HOST_HEADER = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~%!$&'()*+,;=-]*)(:[0-9]*)?")
"""Legal values of the header Host (RFC 9110, section 7.2): a host and perhaps a port."""


def split_host_port(text: str) -> tuple[str, str]:
    """Return the host without brackets, and the port as written, empty if there is none.

    It reads `name:80`, `10.0.0.1:80` and `[::1]:80`. An IPv6 address without brackets has no port. Neither part is
    checked.
    """
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        return host, rest.removeprefix(":")
    if text.count(":") == 1:
        host, _, port = text.partition(":")
        return host, port
    return text, ""


def join_host_port(host: str, port: int) -> str:
    """Return the text that `split_host_port` reads; an IPv6 address gets brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address_in(host: str) -> str:
    """Return the address or name in a text that may be a URL, have a port, or be no address at all."""
    name = host.partition("://")[2] or host
    name, _ = split_host_port(name.partition("/")[0])
    is_number = re.fullmatch(r"[\d.]+", name) is not None
    if not re.fullmatch(r"[\w.:%-]+", name) or (is_number and not _is_ip(name)):
        return "127.0.0.1"
    return name


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


@lru_cache(maxsize=64)
def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


UNIX = "unix"
"""Name that replaces the address for connections through the Unix socket."""
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class TrustedProxies:
    """The proxies whose header is trusted. Any client may send the header, so it is ignored from others."""

    def __init__(self, named: Iterable[str]) -> None:
        """Read the names: addresses, networks such as 10.0.0.0/8, or `unix`. ValueError for anything else."""
        self._trusts_unix = False
        self._networks: list[_Network] = []
        for name in named:
            if name == UNIX:
                self._trusts_unix = True
            else:
                self._networks.append(ipaddress.ip_network(name, strict=False))

    def __bool__(self) -> bool:
        return self._trusts_unix or bool(self._networks)

    def client(self, peer: str | None, headers: Sequence[tuple[bytes, bytes]]) -> str | None:
        """Return the client's address: the last one named by a proxy that is no trusted proxy itself.

        `peer` is the address of the connection, None on the Unix socket. It is the client if it is not trusted, or
        names none.
        """
        if not self.trusts(peer):
            return peer
        named = b",".join(value for name, value in headers if name == b"x-forwarded-for").split(b",")
        client = peer
        for each in reversed(named):
            found = _address(each.strip().decode("latin-1"))
            if found is None:
                break  # the addresses before it cannot be trusted
            client = str(found)
            if not self.trusts(client):
                break
        return client

    def trusts(self, address: str | None) -> bool:
        """Return whether an address is a trusted proxy's; None on the Unix socket."""
        if address is None:
            return self._trusts_unix
        found = _address(address)
        return found is not None and any(found in network for network in self._networks)


def _address(text: str) -> _Address | None:
    """Return an address that may have a port, as proxies write it; None if `text` is no address."""
    host, _ = split_host_port(text)
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return found.ipv4_mapped or found if isinstance(found, ipaddress.IPv6Address) else found
