"""The log's formats and levels. A file of their own, since settings are read before the log is imported."""

from __future__ import annotations

from typing import Literal

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
