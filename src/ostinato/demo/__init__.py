"""The embedded models, shipped in the package, and the generators of their training and test data.

`demo`, a small hybrid, answers the arithmetic word problems of `problems`; `demo-vl`, a small vision-language model,
answers the questions about pictures of `drawings`.
"""

from __future__ import annotations

from pathlib import Path

CHECKPOINTS = {"demo": "checkpoint", "demo-vl": "checkpoint-vl"}
"""Directory of each embedded model, in this package, by the model's name."""


def checkpoint_dir(model: str = "demo") -> Path:
    """Return the directory of an embedded model's checkpoint, in the usual Hugging Face layout."""
    return Path(__file__).parent / CHECKPOINTS[model]
