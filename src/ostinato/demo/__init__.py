"""The embedded models, shipped in the package, and the generators of what they were trained and are tested on.

`demo`, a small hybrid, answers the arithmetic word problems of `problems`; `demo-vl`, a small vision-language model,
answers the questions about pictures of `drawings`.
"""

from __future__ import annotations

from pathlib import Path

CHECKPOINTS = {"demo": "checkpoint", "demo-vl": "checkpoint-vl"}
"""Name of an embedded model -> its directory beside this file."""


def checkpoint_dir(model: str = "demo") -> Path:
    """The directory of an embedded model's checkpoint, in the usual Hugging Face layout."""
    return Path(__file__).parent / CHECKPOINTS[model]
