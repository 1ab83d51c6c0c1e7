"""What can be asked of the log. Apart from it, since settings are read before anything else is imported."""

from __future__ import annotations

from typing import Literal

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
