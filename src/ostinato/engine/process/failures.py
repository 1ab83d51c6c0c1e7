"""What ends requests that are not to blame: a step that failed, an engine that failed or was stopped."""

from __future__ import annotations

import traceback

from ostinato.errors import OstinatoError


class EngineError(RuntimeError):
    """What was raised in the engine's process, and is nobody's to act on. Its note shows the place in the code."""


class EngineFailed(RuntimeError):
    """The engine cannot go on; its server should end. Its cause is what has ended it."""


class EngineStopped(EngineFailed):
    """The engine was stopped, and what was unfinished with it."""


class StepFailed(RuntimeError):
    """An exception in a step ended the request; the engine goes on. It names that exception."""


def portable(error: BaseException) -> Exception:
    """An error that another process can read: the caller's to act on as it is, any other as text."""
    if isinstance(error, OstinatoError):
        return error
    told = EngineError(f"{type(error).__name__}: {error}")
    told.add_note("".join(traceback.format_exception(error)).rstrip())
    return told


def of_step(error: Exception) -> Exception:
    """The error of a request, for the request: what a step raised is that of many, so each gets its own."""
    if isinstance(error, OstinatoError):
        return error
    return StepFailed(f"the step that computed the request failed: {type(error).__name__}: {error}")
