"""Addresses to listen on: the host in a text given as one, and whether other machines can reach it."""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache


def address_in(host: str) -> str:
    """Return the address or name in a text that may be a URL, have a port, or be no address at all."""
    name = host.partition("://")[2] or host
    name = name.partition("/")[0]
    if name.startswith("["):
        name = name[1:].partition("]")[0]
    elif name.count(":") == 1:
        name = name.partition(":")[0]
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
