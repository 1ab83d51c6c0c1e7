"""Decision: one thing that the engine decided or changed, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Decision:
    """`topic` is a setting or a part of the plan; `requested` is null where the user left it open."""

    topic: str
    requested: Any
    effective: Any
    reason: str
