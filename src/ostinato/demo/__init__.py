"""The embedded models, shipped in the package, and the generators of their training and test data.

`demo`, a small hybrid, answers the arithmetic word problems of `problems`; `demo-vl`, a small vision-language model,
answers the questions about pictures of `drawings`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

CHECKPOINTS = {"demo": "checkpoint", "demo-vl": "checkpoint-vl"}
"""Directory of each embedded model, in this package, by the model's name."""


def checkpoint_dir(model: str = "demo") -> Path:
    """Return the directory of an embedded model's checkpoint, in the usual Hugging Face layout."""
    return Path(__file__).parent / CHECKPOINTS[model]


@dataclass(frozen=True)
class Introduction:
    """Introduction of a model. `pictures`: question -> the picture's file, below the page's folder."""

    text: str
    questions: tuple[str, ...]
    pictures: Mapping[str, str] = field(default_factory=dict)

    def image(self, question: str) -> str | None:
        return self.pictures.get(question)


INTRODUCTIONS = {
    "demo": Introduction(
        "A small model that ships with Ostinato. It answers arithmetic word problems of one to three steps, with "
        "numbers up to 999, and shows each step. It knows nothing else, and ignores a system prompt.",
        (
            "Ava has 17 apples and buys 25 more. She gives away 9. How many apples are left?",
            "Tom collects 125 stamps. He loses 17 of them and then gets 48 more. How many stamps does he have now?",
            "A box holds 6 pencils. Mia buys 8 boxes and gives 12 pencils to Leo. How many pencils does Mia have left?",
        ),
    ),
    "demo-vl": Introduction(
        "A small model that ships with Ostinato. It answers questions about drawings of one to three shapes: circles, "
        "squares, triangles, stars and crosses in seven colours. It knows nothing else, and ignores a system prompt.",
        ("What is in the picture?", "How many shapes are there?", "What colour is the background?"),
        {
            "What is in the picture?": "examples/two-shapes.png",
            "How many shapes are there?": "examples/three-shapes.png",
            "What colour is the background?": "examples/dark.png",
        },
    ),
}
"""Introductions by the name that requests use for the model."""
