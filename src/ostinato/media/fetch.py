"""Images from other machines: only from public addresses, with limits on size and time.

The address that was checked is the one that is connected to, for the first URL and for each redirect, so that a name
that changes its address in between leads nowhere else.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx2

from ostinato.errors import RequestError

MAX_BYTES = 20 * 2**20
SECONDS = 10.0
"""Time limit in seconds for a whole fetch, redirects included."""
MAX_REDIRECTS = 3

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")


def is_public(address: Address) -> bool:
    """Return whether an address belongs to the open internet, not to this machine or networks around it."""
    if isinstance(address, ipaddress.IPv6Address):
        # These forms embed an IPv4 address, which is their destination.
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        if inner is None and address in _TRANSLATED:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
        if address.is_site_local:
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


def fetch(
    url: str, *, allowed: Callable[[Address], bool] = is_public, max_bytes: int = MAX_BYTES, seconds: float = SECONDS
) -> bytes:
    """Return the bytes at `url`.

    RequestError if there are none, or if they are too large, too slow, or at an address that is not `allowed`.
    Blocks its thread, and may be called from one that runs an event loop.
    """
    # A separate thread: only an event loop can limit the total time.
    with ThreadPoolExecutor(1, "fetch-image") as executor:
        return executor.submit(lambda: asyncio.run(_within(url, allowed, max_bytes, seconds))).result()


async def _within(url: str, allowed: Callable[[Address], bool], max_bytes: int, seconds: float) -> bytes:
    try:
        async with asyncio.timeout(seconds), httpx2.AsyncClient(trust_env=False, timeout=seconds) as client:
            for _ in range(MAX_REDIRECTS + 1):
                target = _checked(url)
                answer = await _ask(client, target, await _addresses(target, allowed), max_bytes)
                if isinstance(answer, bytes):
                    return answer
                url = str(target.join(answer))
    except (TimeoutError, httpx2.TimeoutException):
        raise RequestError(f"an image was not fetched within {seconds:g} seconds") from None
    except httpx2.InvalidURL:
        raise RequestError("an image has a URL that is not valid") from None
    except (httpx2.HTTPError, OSError) as error:
        raise RequestError(f"an image cannot be fetched from its URL: {type(error).__name__}") from None
    raise RequestError(f"an image's URL leads on to others more than {MAX_REDIRECTS} times")


def _checked(url: str) -> httpx2.URL:
    target = httpx2.URL(url)
    if target.scheme not in ("http", "https") or not target.host:
        raise RequestError("an image's URL should be http or https, also where it leads on to another")
    if target.userinfo:
        raise RequestError("an image's URL should hold no user name or password")
    return target


async def _addresses(target: httpx2.URL, allowed: Callable[[Address], bool]) -> list[Address]:
    """Return the addresses of the host, all of them allowed."""
    host = target.host[:100]
    port = target.port or (443 if target.scheme == "https" else 80)
    # A separate thread, since a look-up cannot be cut short: it is left behind when the time is over.
    executor = ThreadPoolExecutor(1, "look-up-host")
    look_up = partial(socket.getaddrinfo, target.host, port, type=socket.SOCK_STREAM)
    try:
        found = await asyncio.get_running_loop().run_in_executor(executor, look_up)
    except (OSError, UnicodeError):
        raise RequestError(f"the host {host} of an image's URL is not known") from None
    finally:
        executor.shutdown(wait=False)
    addresses = {ipaddress.ip_address(str(entry[4][0]).split("%")[0]) for entry in found}
    if not addresses or not all(map(allowed, addresses)):
        raise RequestError(
            f"the host {host} of an image's URL is not on the public internet; give the image as a data: URL"
        )
    return sorted(addresses, key=lambda address: (address.version, int(address)))


async def _ask(client: httpx2.AsyncClient, target: httpx2.URL, addresses: list[Address], max_bytes: int) -> bytes | str:
    """Return the content at `target`, or the URL that it redirects to."""
    headers = {"Host": target.netloc.decode("ascii"), "Accept": "image/*", "Accept-Encoding": "identity"}
    # Certificates are checked against the name, not against the address.
    extensions = {"sni_hostname": target.raw_host.decode("ascii")}
    for address in addresses:
        place = target.copy_with(host=str(address))
        request = client.build_request("GET", place, headers=headers, extensions=extensions)
        try:
            response = await client.send(request, stream=True, follow_redirects=False)
        except httpx2.ConnectError:
            if address == addresses[-1]:
                raise
            continue
        break
    try:
        if response.has_redirect_location:
            return str(response.headers["location"])
        if response.status_code != 200:
            raise RequestError(f"an image cannot be fetched from its URL: the server answered {response.status_code}")
        return await _content(response, max_bytes)
    finally:
        await response.aclose()


async def _content(response: httpx2.Response, max_bytes: int) -> bytes:
    too_large = f"an image at a URL is larger than {max_bytes} bytes; make it smaller"
    declared = response.headers.get("content-length", "0")
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > max_bytes):
        raise RequestError(too_large)
    parts: list[bytes] = []
    received = 0
    async for part in response.aiter_raw():
        received += len(part)
        if received > max_bytes:
            raise RequestError(too_large)
        parts.append(part)
    return b"".join(parts)
