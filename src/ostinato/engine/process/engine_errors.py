"""Errors that end requests which are not at fault: a step failed, or the engine failed or was stopped."""

from __future__ import annotations

import traceback

from ostinato.errors import OstinatoError, RequestError


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


def picklable_error(error: BaseException) -> Exception:
    """Return an error that another process can read: Ostinato's own unchanged, any other as text."""
    if isinstance(error, OstinatoError):
        return error
    picklable = EngineError(f"{type(error).__name__}: {error}")
    picklable.add_note("".join(traceback.format_exception(error)).rstrip())
    return picklable


def step_error(error: Exception) -> Exception:
    """Return the error of one request. An exception of a step ends many requests, so each gets a separate error."""
    if isinstance(error, OstinatoError):
        return error
    return StepFailed(f"the step that computed the request failed: {type(error).__name__}: {error}")


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
