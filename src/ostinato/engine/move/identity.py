"""What tells an engine from those whose requests it cannot go on with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ostinato.engine.cache_files import checkpoint_files, contents_of
from ostinato.plan.identity import cache_identity
from ostinato.plan.plan import Plan


def engine_identity(plan: Plan, weights: Sequence[Path]) -> dict[str, Any]:
    """Of an engine with these `weights`, directories or files. Copies of them on two machines are alike: what they hold
    counts, and not when they were written."""
    return {
        **cache_identity(plan),
        "max_model_len": plan.settings.max_model_len,
        "weights": [[file.name, *contents_of(file)] for path in weights for file in checkpoint_files(path)],
    }
