"""Errors of a step or of the engine, in the form that its requests' callers get."""

from __future__ import annotations

import traceback

from ostinato.errors import EngineError, OstinatoError, StepFailed


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
