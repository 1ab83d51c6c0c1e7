"""Errors that end requests which are not at fault: a step failed, or the engine failed or was stopped."""

from __future__ import annotations

import traceback

from ostinato.errors import OstinatoError


class EngineError(RuntimeError):
    """An unexpected error in the engine's process. Its note holds the traceback."""


class EngineFailed(RuntimeError):
    """The engine cannot go on, and its server should end. The cause is the error that ended it."""


class EngineStopped(EngineFailed):
    """The engine was stopped before the request had ended."""


class EngineDraining(EngineStopped):
    """The engine moves its requests away, and takes none in."""


class StepFailed(RuntimeError):
    """An exception in a step, which the message names, ended the request. The engine goes on."""


class ReplicaLost(RuntimeError):
    """One of several engines ended while it computed the request. The others go on, and a new one comes."""


def portable(error: BaseException) -> Exception:
    """An error that another process can read: Ostinato's own as they are, any other as text."""
    if isinstance(error, OstinatoError):
        return error
    told = EngineError(f"{type(error).__name__}: {error}")
    told.add_note("".join(traceback.format_exception(error)).rstrip())
    return told


def of_step(error: Exception) -> Exception:
    """The error that one request gets: an exception of a step ends many requests, so each gets an error of its own."""
    if isinstance(error, OstinatoError):
        return error
    return StepFailed(f"the step that computed the request failed: {type(error).__name__}: {error}")
