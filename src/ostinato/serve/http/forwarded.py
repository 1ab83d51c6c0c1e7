"""Who a client is behind proxies that are trusted to say so, by the header X-Forwarded-For."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence

UNIX = "unix"
"""In place of an address: whoever comes through the Unix socket."""
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class TrustedProxies:
    """The proxies whose header is believed. Anybody may send it, so everybody else's is not read."""

    def __init__(self, named: Iterable[str]) -> None:
        """Addresses, networks such as 10.0.0.0/8, or `unix`. ValueError for anything else."""
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
        """The client's address: the last one that a proxy names which is no trusted proxy itself. `peer` is who the
        connection is from, None on the Unix socket; it is the client if it is not trusted, or names none."""
        if not self.trusts(peer):
            return peer
        named = b",".join(value for name, value in headers if name == b"x-forwarded-for").split(b",")
        client = peer
        for each in reversed(named):
            found = _address(each.strip().decode("latin-1"))
            if found is None:
                break  # what stands before it is not to be trusted
            client = str(found)
            if not self.trusts(client):
                break
        return client

    def trusts(self, address: str | None) -> bool:
        """Whether it is a proxy's; None on the Unix socket."""
        if address is None:
            return self._trusts_unix
        found = _address(address)
        return found is not None and any(found in network for network in self._networks)


def _address(text: str) -> _Address | None:
    """An address, perhaps with a port, as proxies write it; None for what is none."""
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        found = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return found.ipv4_mapped or found if isinstance(found, ipaddress.IPv6Address) else found
