"""Identity of an engine: the properties that two engines must share to exchange requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ostinato.engine.cache_files import checkpoint_files, file_fingerprint
from ostinato.plan.identity import cache_fingerprint
from ostinato.plan.plan import Plan


def engine_identity(plan: Plan, weights: Sequence[Path]) -> dict[str, Any]:
    """Return the identity of an engine with these `weights`, directories or files.

    Copies of them on two machines are equal: their contents count, not when they were written.
    """
    return {
        **cache_fingerprint(plan),
        "max_model_len": plan.settings.max_model_len,
        "weights": [[file.name, *file_fingerprint(file)] for path in weights for file in checkpoint_files(path)],
    }
