"""The files of a batch: requests, one a line, and their answers, in the form of OpenAI's batches."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ostinato.errors import RequestError, os_error_text
from ostinato.files import why_unwritable
from ostinato.json_io import JsonObject, parse_json

_BEGIN = b'{"id":"batch_req_'
"""First bytes of every line of answers."""
_MEMBERS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True, slots=True)
class BatchLine:
    """Position of a request in its file."""

    custom_id: str
    url: str
    offset: int


def read_lines(path: Path, urls: Collection[str]) -> list[BatchLine]:
    """Return the requests of a file, without validating their bodies. Blank lines are skipped.

    RequestError, which names the line, for one that is no request of a batch, or has the custom_id of another.
    """
    lines: dict[str, BatchLine] = {}
    numbers: dict[str, int] = {}
    try:
        with open(path, "rb", opener=_nowait) as file:
            # Bodies are read again when their requests are prepared.
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise RequestError(f"{path} is no file that can be read twice; write the requests to one first")
            offset = 0
            for number, text in enumerate(file, start=1):
                if text.strip():
                    try:
                        line = _checked(text, offset, urls)
                    except ValueError as error:
                        raise RequestError(f"{path}, line {number}: {error}") from None
                    before = numbers.setdefault(line.custom_id, number)
                    if before != number:
                        message = f"{path}, line {number}: line {before} has its custom_id {line.custom_id!r} too"
                        raise RequestError(message)
                    lines[line.custom_id] = line
                offset += len(text)
    except OSError as error:
        raise RequestError(f"the requests in {path} cannot be read: {os_error_text(error)}") from None
    if not lines:
        raise RequestError(f"there is no request in {path}; put one on each line")
    return list(lines.values())


def _checked(text: bytes, offset: int, urls: Collection[str]) -> BatchLine:
    """Return a line's request. ValueError if it is none."""
    value = _object(text)
    for name in value:
        if name not in _MEMBERS:
            raise ValueError(f"{name!r} is unknown; a request has {', '.join(_MEMBERS)}")
    custom_id, url = value.get("custom_id"), value.get("url")
    if not isinstance(custom_id, str) or not custom_id:
        raise ValueError("custom_id should be a text that is not empty")
    if value.get("method") != "POST":
        raise ValueError('method should be "POST"')
    if not isinstance(url, str) or url not in urls:
        raise ValueError(f"url should be {' or '.join(urls)}, not {url!r}")
    if not isinstance(value.get("body"), dict):
        raise ValueError("body should be an object")
    return BatchLine(custom_id, url, offset)


def read_bodies(path: Path, lines: Collection[BatchLine]) -> Iterator[tuple[BatchLine, JsonObject]]:
    """Yield each request with its body, one after the other."""
    with path.open("rb") as file:
        for line in lines:
            file.seek(line.offset)
            yield line, json.loads(file.readline())["body"]


def _object(text: bytes) -> JsonObject:
    try:
        value = parse_json(text)
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("it should be a JSON object")
    return value


class AnswerFile:
    """File of answers that may have some already, and receives further ones. Only one process can open it at a time."""

    def __init__(self, path: Path) -> None:
        """Open the file, and remove a last line that was cut off.

        RequestError for a file that cannot be written, that another process has open, or that holds anything else than
        answers; such a file stays unchanged.
        """
        self.path = path
        self.statuses: dict[str, int] = {}
        """Status of every answer in the file: custom_id -> HTTP status."""
        try:
            self._file = os.fdopen(_nowait(str(path), os.O_RDWR | os.O_APPEND | os.O_CREAT), "a+b")
        except OSError as error:  # also raised for a pipe
            raise RequestError(f"answers cannot be written to {path}: {why_unwritable(path, error)}") from None
        try:
            if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                raise RequestError(f"{path} is no file that could be read to go on; name one for the answers")
            self._lock()
            self._read()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Closing tries once more to write what `write` has reported as unwritten.
        with contextlib.suppress(OSError):
            self._file.close()

    @property
    def num_refused(self) -> int:
        """Answers that are errors."""
        return sum(status != 200 for status in self.statuses.values())

    def write(self, custom_id: str, status: int, request_id: str, body: bytes) -> None:
        """Add an answer, whose `body` is JSON in one line. RequestError if there is no room for it."""
        assert b"\n" not in body, "an answer is one line"
        ids = f'{uuid.uuid4().hex}","custom_id":{json.dumps(custom_id)}'
        response = f'"response":{{"status_code":{status},"request_id":{json.dumps(request_id)},"body":'
        try:
            self._file.write(_BEGIN + f"{ids},{response}".encode() + body + b'},"error":null}\n')
            self._file.flush()
            if not os.fstat(self._file.fileno()).st_nlink:
                raise FileNotFoundError(errno.ENOENT, "it has been removed meanwhile")
        except OSError as error:
            message = f"answers cannot be written to {self.path}: {os_error_text(error)}; the same command goes on"
            raise RequestError(message) from None
        self.statuses[custom_id] = status

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RequestError(f"another process is writing answers to {self.path}") from None

    def _read(self) -> None:
        self._file.seek(0)
        whole = 0
        for number, text in enumerate(self._file, start=1):
            try:
                custom_id, status = _answer(text)
            except ValueError as error:
                if self._file.read(1) or not _is_torn(text):
                    message = f"{self.path}, line {number} is no answer of a batch ({error}); name another file"
                    raise RequestError(message) from None
                os.ftruncate(self._file.fileno(), whole)
                break
            if custom_id in self.statuses:
                raise RequestError(f"{self.path}, line {number} answers {custom_id!r} again; remove one of them")
            self.statuses[custom_id] = status
            whole += len(text)
            if not text.endswith(b"\n"):
                self._file.write(b"\n")
                self._file.flush()


def _nowait(path: str, flags: int) -> int:
    """Open a pipe without waiting for its other end."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)


def _is_torn(text: bytes) -> bool:
    """Return whether `text` may be the beginning of an answer that was not written to its end."""
    return text.startswith(_BEGIN) or _BEGIN.startswith(text)


def _answer(text: bytes) -> tuple[str, int]:
    """Return (custom_id, status). ValueError if `text` is no answer."""
    match _object(text):
        case {"custom_id": str(custom_id), "response": {"status_code": int(status)}}:
            return custom_id, status
    raise ValueError("it should have a custom_id and a response with its status_code")
