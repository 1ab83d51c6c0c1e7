"""Decisions on which tokenizer and chat template are used."""

from __future__ import annotations

from collections.abc import Iterator

from ostinato.config import EngineConfig
from ostinato.plan.decision import Decision
from ostinato.plan.model import ModelSpec


def text_decisions(config: EngineConfig, model: ModelSpec) -> Iterator[Decision]:
    """Yield the decisions on a tokenizer or template that was given in place of the checkpoint's own."""
    if config.tokenizer is not None:
        reason = "as given, in place of the checkpoint's, and its chat template too"
        if model.given_tokens is not None:
            reason += f"; {model.given_tokens:,} of the model's {model.vocab_size:,} token ids have a text"
        yield Decision("tokenizer", config.tokenizer, config.tokenizer, reason)
    if config.chat_template is not None:
        whose = "checkpoint's" if config.tokenizer is None else "tokenizer's"
        reason = f"as given, in place of the {whose}"
        yield Decision("chat_template", config.chat_template, config.chat_template, reason)
