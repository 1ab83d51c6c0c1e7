"""CaptureError: why a step cannot become a graph."""

from __future__ import annotations

from ostinato.errors import OstinatoError


class CaptureError(OstinatoError):
    """What was being captured would not be the same when it is replayed: a bug in a model or a kernel."""
