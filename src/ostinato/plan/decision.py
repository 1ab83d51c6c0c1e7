"""Decisions: each is one thing that the engine decided or changed, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ostinato.config import EngineConfig


@dataclass(frozen=True)
class Decision:
    """One decision: `topic` (a setting or part of the plan), `requested` (given, else the default) and its reason."""

    topic: str
    requested: object
    effective: Any
    reason: str


def no_effect(config: EngineConfig, setting: str, why: str) -> Decision:
    """Return the decision that a setting keeps its value but changes nothing."""
    value = getattr(config, setting)
    value = list(value) if isinstance(value, tuple) else value
    return Decision(setting, value, value, f"without effect: {why}")
