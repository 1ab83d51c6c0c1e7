"""Errors that a user can meet, each with its remedies as data.

A message says what was asked, what is possible and what to change. A remedy names one setting and the nearest value of
it that works; where a planner computed it, planning again with that value succeeds.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_LONG_WORD = re.compile(r"\S{1000,}")

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 1000
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = _SHORT.maxfrozenset = 20
short_repr = _SHORT.repr
"""Form of a wrong value in an error, whatever its length and depth."""


@dataclass(frozen=True)
class Remedy:
    """One change that would make the request possible; value None leaves the setting open."""

    setting: str
    value: Any

    def __str__(self) -> str:
        if self.value is None:
            return f"leave out {self.setting}"
        # JSON works for an object both on the command line and in Python.
        value = json.dumps(self.value) if isinstance(self.value, dict) else self.value
        return f"set {self.setting} to {value}"


class OstinatoError(Exception):
    """Base of all errors that the caller can act on; anything else that is raised is a bug."""

    def __init__(self, message: str, remedies: Iterable[Remedy] = ()) -> None:
        # A message may quote a file that is not text, which must not keep it from being printed.
        message = message.encode("utf-8", "backslashreplace").decode()
        # Or a value of any length, which is shown as far as it can be recognised.
        message = _LONG_WORD.sub(lambda word: f"{word[0][:200]} ... {word[0][-100:]}", message)
        super().__init__(message)
        self.message = message
        self.remedies = tuple(remedies)

    def __reduce__(self) -> tuple[object, ...]:
        return _restored, (type(self), self.args, self.__dict__)  # not by `__init__`, whose arguments are other ones

    def to_json(self) -> dict[str, Any]:
        """Return the error as plain data, in the form that every `--json` command prints."""
        return {
            "error": {
                "type": type(self).__name__,
                "message": self.message,
                "remedies": [{"setting": remedy.setting, "value": remedy.value} for remedy in self.remedies],
            }
        }


def _restored(kind: type[OstinatoError], args: tuple[object, ...], state: dict[str, Any]) -> OstinatoError:
    """Return an error that was pickled."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class ConfigError(OstinatoError):
    """Error for a setting that is unknown, malformed, or contradicts another one."""


class CapacityError(OstinatoError):
    """Error for a demand that does not fit into the memory of the device."""


class ModelError(OstinatoError):
    """Error for a checkpoint that is not found, incomplete, damaged, or of an unsupported kind."""


class RequestError(OstinatoError):
    """Error for one request that cannot be served; the engine continues to serve the others.

    `setting` is the request's setting that is wrong, if it is one.
    """

    parts: tuple[tuple[str, str], ...] = ()
    """Names of settings in the message, each with the text after it, for messages in which others may stand."""

    def __init__(self, message: str, remedies: Iterable[Remedy] = (), setting: str | None = None) -> None:
        super().__init__(message, remedies)
        self.setting = setting or next((remedy.setting for remedy in self.remedies), None)

    @classmethod
    def of_parts(
        cls, parts: Sequence[tuple[str, str]], remedies: Iterable[Remedy] = (), setting: str | None = None
    ) -> RequestError:
        """Return an error with these `parts`; by default `setting` is the first one's name."""
        error = cls("".join(f"{name}{text}" for name, text in parts), remedies, setting or parts[0][0])
        error.parts = tuple(parts)
        return error

    def renamed(self, names: Mapping[str, str]) -> RequestError:
        """Return the error with the names by which its reader knows the settings; `names` has some, by ours."""

        def other(name: str) -> str:
            head, dot, rest = name.partition(".")
            return names.get(name) or f"{names.get(head, head)}{dot}{rest}"

        if not self.parts:
            return self
        parts = [(other(name), text) for name, text in self.parts]
        return RequestError.of_parts(parts, self.remedies, self.setting and other(self.setting))


class PromptsFailed(RequestError):
    """Error for prompts of one call that failed while they ran, where the call returns no outputs that could say so.

    `outputs` has what the call would have returned, with None for those prompts.
    """

    def __init__(self, message: str, outputs: Sequence[Any]) -> None:
        super().__init__(message)
        self.outputs = list(outputs)


class ContextLengthError(RequestError):
    """Error for a prompt of more tokens than the context has room for (`scheduler.limits.check_prompt_length`)."""

    num_tokens: int
    """Tokens of the prompt."""
    is_counted: bool
    """True if `num_tokens` is exact; a lower bound comes from a long text, which is not tokenized."""
    max_tokens: int
    """Most tokens of a prompt: one less than `max_model_len` if an output follows."""
    max_model_len: int


class MediaError(RequestError):
    """Error for an image of a conversation that cannot be taken. `setting` is the place of what is wrong."""

    def __init__(self, where: str, reason: str, remedies: Iterable[Remedy] = (), path: str | None = None) -> None:
        super().__init__(f"{where}: {reason}", remedies, path or where)
        self.where, self.reason = where, reason


class MoveError(RequestError):
    """Error for a request that another engine has exported, and this one cannot import."""


class DamagedExport(MoveError):
    """Error for bytes that are not an export, are not all of one, or contradict each other."""


class ForeignExport(MoveError):
    """Error for a request from an engine with another plan. `differences` has a sentence for each difference."""

    def __init__(self, differences: Iterable[str] | str) -> None:
        found = [differences] if isinstance(differences, str) else list(differences)
        self.differences = tuple(found)
        super().__init__(
            f"the request was exported by an engine of another plan: {'; '.join(found)}. Start both engines with the "
            "same model and settings"
        )


class RecordError(OstinatoError):
    """Error for a record that cannot be read, or cannot be replayed."""


class DamagedRecord(RecordError):
    """Error for a file of a record that holds other bytes than were written."""


class TruncatedRecord(DamagedRecord):
    """Error for a file of a record that ends within a block. What stands before it is whole."""


class RankError(OstinatoError):
    """Error for a rank that has ended or failed, so that the engine cannot continue.

    Ranks are the processes that share a model.
    """


class CaptureError(OstinatoError):
    """Error for a step that would not be the same when its graph is replayed: a bug in a model or a kernel."""


class ForkError(OstinatoError):
    """Error for a forked process that uses an engine. The computing threads stayed in the process that was forked."""

    def __init__(self, message: str) -> None:
        remedy = "start processes with multiprocessing.get_context('spawn'), and make an LLM in each"
        super().__init__(f"{message}: the threads that compute stayed behind, and it would wait for ever; {remedy}")


class EngineError(RuntimeError):
    """Unexpected error in the engine's process. Its note holds the traceback."""


class EngineFailed(RuntimeError):
    """Error for an engine that cannot continue; its server should end. The cause is the error that ended the engine."""


class EngineStopped(EngineFailed):
    """Error for a request that had not ended when the engine was stopped."""


class EngineDraining(EngineStopped):
    """Error for a new request on an engine that migrates its requests."""


class StepFailed(RuntimeError):
    """Error for a request that an exception in a step, named in the message, has ended. The engine continues."""


class ReplicaLost(RuntimeError):
    """Error for a request whose engine ended while it computed it.

    The other engines continue, and a new one is started.
    """


class Overloaded(RequestError):
    """Error for a full queue, or a client whose share of it is used up.

    `retry_after` is the number of seconds after which there is likely to be room.
    """

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineExceeded(RequestError):
    """Error for a request that was ended because its deadline passed."""


class BacklogExceeded(RequestError):
    """Error for a request that was ended because its client takes too little of its answers."""


def os_error_text(error: Exception) -> str:
    """Return why a file could not be read or written, in the system's words without its numbers and paths."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not text in UTF-8"
    if isinstance(error, UnicodeEncodeError):
        return f"UTF-8 has no {error.object[error.start]!a}, which the text holds"
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON ({error})"
    return getattr(error, "strerror", None) or str(error)
