"""`/about`: facts about the model for visitors of the page."""

from __future__ import annotations

from typing import Any

from ostinato.demo.introduction import INTRODUCTIONS, Introduction
from ostinato.serve.work.model import ServedModel

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_OTHERS = Introduction(
    "",
    (
        "Explain in three sentences what a state space model keeps of a text.",
        "Write a Python function that says whether a number is prime, with a test.",
        "Derive the sum of the first n odd numbers, in formulas.",
        "Compare three ways to brew coffee in a table.",
    ),
)
"""Example questions for a model without an introduction."""


def about_model(model: ServedModel, name: str) -> dict[str, Any]:
    """Return the answer of `/about` as plain data.

    `examples` are questions, some with a picture (a path below the page's own).
    """
    engine, text = model.engine, model.text
    spec, settings = engine.plan.model, engine.plan.settings
    known = INTRODUCTIONS.get(settings.model, _OTHERS)
    return {
        "model": name,
        "architecture": spec.architecture,
        "parameters": spec.parameters,
        "layers": spec.layers,
        "max_model_len": settings.max_model_len,
        "introduction": known.text or None,
        "examples": [{"text": question, "image": known.image(question)} for question in known.questions],
        "chats": text.chat_template.has_default,
        "takes_images": text.media is not None,
        "takes_tools": text.takes_tools and text.formats.tools is not None,
        "reasons": text.formats.reasoning is not None,
        "sampling": {key: getattr(engine.default_params, key) for key in _SAMPLING},
    }
