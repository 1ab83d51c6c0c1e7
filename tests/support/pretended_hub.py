"""A hub on a loopback port: as much of the Hugging Face hub's HTTP as its client needs to fetch a repository."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "c0ffee" + "0" * 34
LARGE = 2**20
"""bytes of files that the hub keeps beside git"""
_API = re.compile(
    r"/api/models/(?P<name>[^/]+/[^/?]+)(/revision/(?P<revision>[^/?]+))?(/tree/(?P<tree>[^/?]+))?(\?.*)?"
)
_FILE = re.compile(r"/(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")


@dataclass
class Hub:
    """`repositories` has path -> content of each OWNER/NAME."""

    repositories: dict[str, dict[str, bytes]]
    url: str = ""
    gated: set[str] = field(default_factory=set)
    """Those whose files nobody gets who does not send the token `secret`."""
    breaks: dict[str, int] = field(default_factory=dict)
    """Path -> bytes after which the connection breaks, once."""
    stalls: dict[str, int] = field(default_factory=dict)
    """Path -> bytes after which nothing more comes, until the other side gives up."""
    down: bool = False
    """Whether everything is answered with status 503."""
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    """Method, path and range of each request."""

    def files_asked(self) -> list[str]:
        """The files that were sent, or of which a part was."""
        found = [_FILE.fullmatch(path) for method, path, _ in self.asked if method == "GET"]
        return [each["path"] for each in found if each is not None]


def files_of(directory: Path) -> dict[str, bytes]:
    """A directory's files, as a repository has them."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


@contextmanager
def pretended_hub(**repositories: dict[str, bytes]) -> Iterator[Hub]:
    """A hub with these repositories, each `OWNER__NAME`."""
    hub = Hub({name.replace("__", "/"): files for name, files in repositories.items()})

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(has_body=False)

        def do_GET(self) -> None:
            self._answer(has_body=True)

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self, *, has_body: bool) -> None:
            hub.asked.append((self.command, self.path, self.headers.get("Range")))
            if hub.down:
                self._send(503, b"", {}, has_body)
            elif found := _API.fullmatch(self.path):
                self._tell(found, has_body)
            elif found := _FILE.fullmatch(self.path):
                self._give(found, has_body)
            else:
                self._refuse(404, "EntryNotFound", has_body)

        def _tell(self, found: re.Match[str], has_body: bool) -> None:
            files = hub.repositories.get(found["name"])
            revision = found["revision"] or found["tree"] or "main"
            if files is None:
                self._refuse(401, "RepoNotFound", has_body)
            elif revision not in ("main", COMMIT):
                self._refuse(404, "RevisionNotFound", has_body)
            elif found["tree"]:
                listed = [
                    {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                    for path, content in files.items()
                ]
                self._send(200, json.dumps(listed).encode(), {}, has_body)
            else:
                siblings = [{"rfilename": path, **_facts(content)} for path, content in files.items()]
                told = {"id": found["name"], "sha": COMMIT, "siblings": siblings}
                self._send(200, json.dumps(told).encode(), {}, has_body)

        def _give(self, found: re.Match[str], has_body: bool) -> None:
            content = hub.repositories.get(found["name"], {}).get(found["path"])
            if found["name"] in hub.gated and self.headers.get("Authorization") != "Bearer secret":
                self._refuse(403 if "Authorization" in self.headers else 401, "GatedRepo", has_body)
            elif content is None:
                self._refuse(404, "EntryNotFound", has_body)
            else:
                first = int((self.headers.get("Range") or "bytes=0-")[6:].partition("-")[0])
                about = {"ETag": f'"{_id(content)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
                if first:
                    about["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
                end = hub.breaks.pop(found["path"], None) if has_body else None
                stall = hub.stalls.pop(found["path"], None) if has_body else None
                if stall is not None:
                    self._stall(content, about, stall)
                    return
                self._send(206 if first else 200, content[first:], about, has_body, end)

        def _stall(self, content: bytes, about: dict[str, str], end: int) -> None:
            self.send_response(200)
            for name, value in {"Content-Length": str(len(content)), **about}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content[:end])
            self.wfile.flush()
            self.connection.recv(1)  # nothing, when the other side has ended
            self.close_connection = True

        def _refuse(self, status: int, code: str, has_body: bool) -> None:
            self._send(status, b"{}", {"X-Error-Code": code}, has_body)

        def _send(
            self, status: int, body: bytes, about: dict[str, str], has_body: bool, end: int | None = None
        ) -> None:
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **about}.items():
                self.send_header(name, value)
            self.end_headers()
            if has_body:
                self.wfile.write(body[:end])
            if end is not None:
                self.close_connection = True

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


def _id(content: bytes) -> str:
    """A file's ETag: large ones have the SHA-256 of their content."""
    return (hashlib.sha256 if len(content) >= LARGE else hashlib.sha1)(content).hexdigest()


def _facts(content: bytes) -> dict[str, object]:
    """What is told of a file beside its name: of a large one that git only points to it (LFS)."""
    size = len(content)
    points = {"lfs": {"sha256": _id(content), "size": size, "pointerSize": 130}} if size >= LARGE else {}
    return {"size": size, **points}
