"""Decision: one thing that the engine decided or changed, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Decision:
    """`topic` is a setting or a part of the plan; `requested` is what the user gave, else the default, if
    any."""

    topic: str
    requested: Any
    effective: Any
    reason: str
