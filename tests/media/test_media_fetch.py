"""Images are fetched from public addresses alone, within their limits."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ostinato.errors import RequestError
from ostinato.media.fetch import fetch, is_public
from tests.support.patience import PATIENCE

HERE = ipaddress.ip_address("127.0.0.1")


class _Site(BaseHTTPRequestHandler):
    """/NUMBER: so many bytes; /to/URL: leads there; /slow: a byte now and then; /again: leads to itself."""

    seen: list[str] = []  # noqa: RUF012
    slow_ended = threading.Event()
    """Set where all bytes of /slow were sent."""

    def do_GET(self):
        self.seen.append(self.headers["Host"])
        name = self.path[1:]
        if name.startswith("to/"):
            self._lead(name[3:])
        elif name == "again":
            self._lead("/again")
        elif name == "slow":
            self.send_response(200)
            self.end_headers()
            for _ in range(600):
                try:
                    self.wfile.write(b"x")
                except OSError:
                    return
                time.sleep(0.1)
            self.slow_ended.set()
        elif name.startswith("unsized/"):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"x" * int(name[8:]))
        elif name.isdigit():
            self.send_response(200)
            self.send_header("Content-Length", name)
            self.end_headers()
            self.wfile.write(b"x" * int(name))
        else:
            self.send_error(404)

    def _lead(self, url):
        self.send_response(302)
        self.send_header("Location", url)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def site():
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Site)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def get(url, **limits):
    return fetch(
        url, allowed=lambda address: address == HERE, **{"max_bytes": 1000, "seconds": float(PATIENCE), **limits}
    )


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.8.8.8",
        "0.0.0.0",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "224.0.0.1",
        "255.255.255.255",
        "192.0.2.1",
        "::1",
        "::",
        "fe80::1",
        "fec0::1",
        "fd00::1",
        "ff02::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "::127.0.0.1",
        "64:ff9b::7f00:1",
        "64:ff9b::a00:1",
        "2002:7f00:1::",
        "2001:0:4136:e378:8000:63bf:80ff:fffe",
    ],
)
def test_addresses_of_this_machine_and_its_networks_are_not_public(address):
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "151.101.1.69", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_addresses_of_the_internet_are_public(address):
    assert is_public(ipaddress.ip_address(address))


def test_what_a_url_holds_is_fetched(site):
    assert get(f"{site}/12") == b"x" * 12
    assert get(f"{site}/to/{site}/7") == b"x" * 7
    assert get(f"{site}/to//3") == b"xxx"


def test_a_thread_that_runs_an_event_loop_can_fetch(site):
    async def inside():
        return get(f"{site}/5")

    assert asyncio.run(inside()) == b"xxxxx"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "2130706433", "0x7f000001"])
def test_this_machine_is_no_place_to_fetch_from(site, host):
    port = site.rpartition(":")[2]
    with pytest.raises(RequestError, match=r"not on the public internet|is not known"):
        fetch(f"http://{host}:{port}/12")


def test_a_url_that_leads_to_a_private_address_is_refused(site, monkeypatch):
    look_up = socket.getaddrinfo
    inside = {"inside.example": "10.0.0.2"}
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *a, **k: look_up(inside.get(host, host), *a, **k))
    for private in ("http://169.254.169.254/latest", "http://10.0.0.1/", "http://inside.example/"):
        with pytest.raises(RequestError, match="not on the public internet"):
            get(f"{site}/to/{private}")


def test_a_host_with_one_private_address_among_others_is_refused(site, monkeypatch):
    def both(_host, port, **_):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port)) for ip in ("127.0.0.1", "10.0.0.1")]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    with pytest.raises(RequestError, match="not on the public internet"):
        get(f"{site}/12")


def test_a_name_is_looked_up_once_and_its_address_connected_to(site, monkeypatch):
    """Otherwise a name could have a public address when it is looked at, and a private one when it is connected to."""
    asked = []

    def rebinding(host, port, *_, **__):
        asked.append(host)
        address = "127.0.0.1" if len(asked) == 1 else "10.0.0.1"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    port = site.rpartition(":")[2]
    _Site.seen.clear()
    assert get(f"http://pictures.example:{port}/4") == b"xxxx"
    assert asked[0] == "pictures.example"
    assert _Site.seen == [f"pictures.example:{port}"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/1001", "larger than 1000 bytes"),
        ("/unsized/1001", "larger than 1000 bytes"),
        ("/absent", "answered 404"),
        ("/again", "more than 3 times"),
        ("/to/file:///etc/passwd", "should be http or https"),
        ("/to/http://a:b@127.0.0.1/", "no user name"),
    ],
)
def test_what_is_too_large_or_not_there_is_refused(site, path, message):
    with pytest.raises(RequestError, match=message):
        get(site + path)


def test_a_server_that_dribbles_is_left_in_time(site):
    with pytest.raises(RequestError, match=r"not fetched within 0\.5 seconds"):
        get(f"{site}/slow", seconds=0.5)
    assert not _Site.slow_ended.is_set()


def test_a_name_that_is_looked_up_for_long_is_left_in_time(monkeypatch):
    is_over, was_over = threading.Event(), threading.Event()

    def look_up(*_, **__):
        if is_over.wait(PATIENCE):
            return
        was_over.set()

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with pytest.raises(RequestError, match=r"not fetched within 0\.2 seconds"):
        get("http://pictures.example/1", seconds=0.2)
    assert not was_over.is_set()
    is_over.set()


@pytest.mark.parametrize("url", ["http://", "http://[", "http://nowhere.invalid/x", "http://a b/"])
def test_urls_that_lead_nowhere_are_refused(url):
    with pytest.raises(RequestError):
        get(url)


def test_a_closed_port_is_refused_without_its_address():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))  # nobody else gets it, and nobody listens
        port = sock.getsockname()[1]
        with pytest.raises(RequestError, match="cannot be fetched") as error:
            get(f"http://127.0.0.1:{port}/")
    assert "127.0.0.1" not in error.value.message
