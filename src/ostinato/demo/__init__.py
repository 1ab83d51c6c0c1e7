"""The embedded model: a small hybrid that answers arithmetic word problems, shipped in the package.

`checkpoint_dir` is where its checkpoint lies; `problems` generates what it was trained and is tested on.
"""

from __future__ import annotations

from pathlib import Path


def checkpoint_dir() -> Path:
    """The directory of the embedded checkpoint, in the usual Hugging Face layout."""
    return Path(__file__).parent / "checkpoint"
