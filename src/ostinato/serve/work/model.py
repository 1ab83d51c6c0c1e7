"""The model in the endpoints' form."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.engine.process.async_engine import AsyncEngine
from ostinato.serve.chat.guides import GuideCompiler
from ostinato.serve.chat.model_text import ModelText
from ostinato.serve.settings import ServeSettings
from ostinato.serve.work.context import Work


@dataclass(frozen=True)
class Model:
    """An engine and the work of its requests, made once and used on the event loop."""

    engine: AsyncEngine
    text: ModelText
    compiler: GuideCompiler
    work: Work
    """Work for requests that are prepared on the event loop."""


def model_of(engine: AsyncEngine, settings: ServeSettings, model_name: str) -> Model:
    max_model_len = engine.plan.settings.max_model_len
    text = ModelText(engine.tokenizer, engine.chat_template, engine.media, engine.vocab_size, max_model_len, settings)
    work = Work(text, settings, model_name, engine.default_params)
    return Model(engine, text, GuideCompiler(engine), work)
