"""The kinds of error that a user can meet, each with its remedies as data.

A message says what was asked, what is possible and what to change. A remedy names one setting and the nearest
value of it that works; where a planner computed it, planning again with that value succeeds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Remedy:
    """One change that would make the request possible; value None leaves the setting open."""

    setting: str
    value: Any

    def __str__(self) -> str:
        if self.value is None:
            return f"leave out {self.setting}"
        # An object as JSON: that can be given on the command line, and in Python too.
        value = json.dumps(self.value) if isinstance(self.value, dict) else self.value
        return f"set {self.setting} to {value}"


class OstinatoError(Exception):
    """Base of all errors that are the caller's to act on; anything else that is raised is a bug."""

    def __init__(self, message: str, remedies: Iterable[Remedy] = ()) -> None:
        # What a file says in it may be no text at all, and must not keep the message from being printed.
        message = message.encode("utf-8", "backslashreplace").decode()
        super().__init__(message)
        self.message = message
        self.remedies = tuple(remedies)

    def to_json(self) -> dict[str, Any]:
        """The error as plain data, in the form that every `--json` command prints."""
        return {
            "error": {
                "type": type(self).__name__,
                "message": self.message,
                "remedies": [{"setting": remedy.setting, "value": remedy.value} for remedy in self.remedies],
            }
        }


class ConfigError(OstinatoError):
    """A setting is unknown, malformed, or contradicts another one."""


class CapacityError(OstinatoError):
    """What was asked for does not fit into the memory of the device."""


class ModelError(OstinatoError):
    """A checkpoint cannot be used: not found, incomplete, damaged, or of an unsupported kind."""


class RequestError(OstinatoError):
    """One request cannot be served; the engine goes on serving the others. `setting` is what of it is wrong, where that
    is one."""

    def __init__(self, message: str, remedies: Iterable[Remedy] = (), setting: str | None = None) -> None:
        super().__init__(message, remedies)
        self.setting = setting or next((remedy.setting for remedy in self.remedies), None)


class MoveError(RequestError):
    """A request that another engine has exported cannot be taken in."""


class DamagedExport(MoveError):
    """The bytes are not those of an export, or not all of them, or do not add up."""


class ForeignExport(MoveError):
    """The engine that exported the request is of another plan. `differences` has a sentence for each."""

    def __init__(self, differences: Iterable[str] | str) -> None:
        found = [differences] if isinstance(differences, str) else list(differences)
        self.differences = tuple(found)
        super().__init__(
            f"the request was exported by an engine of another plan: {'; '.join(found)}. Start both engines with the "
            "same model and settings"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return ForeignExport, (list(self.differences),)


class RankError(OstinatoError):
    """One of the processes that share a model has ended or failed, so that the engine cannot go on."""


class CaptureError(OstinatoError):
    """What was being captured would not be the same when it is replayed: a bug in a model or a kernel."""


class ForkError(OstinatoError):
    """A forked process cannot use an engine: the threads that compute stayed behind in the process that was forked."""

    def __init__(self, message: str) -> None:
        remedy = "start processes with multiprocessing.get_context('spawn'), and make an LLM in each"
        super().__init__(f"{message}: the threads that compute stayed behind, and it would wait for ever; {remedy}")


def reason(error: Exception) -> str:
    """Why a file could not be read or written: of what the system says, the words alone."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not text in UTF-8"
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON ({error})"
    return getattr(error, "strerror", None) or str(error)


def problem_of(found: Mapping[str, Any], equals: str = " = ") -> tuple[str, list[Remedy]]:
    """What pydantic found wrong with one setting, and the nearest legal value, if there is one."""
    # What is wrong with a key of an object is told as its input: `[key]` is pydantic's word for where it stands.
    loc = found["loc"][:-2] if found["loc"][-1:] == ("[key]",) else found["loc"]
    name, said = ".".join(map(str, loc)), str(found["msg"]).removeprefix("Value error, ")
    about = found.get("ctx", {})
    nearest = [about[key] for key in ("nearest", "ge", "le") if key in about]
    text = f"{name}{equals}{found['input']!r}: {said[:1].lower()}{said[1:]}" if name else said
    return text, [*about.get("remedies", ()), *(Remedy(name, value) for value in nearest[:1])]
