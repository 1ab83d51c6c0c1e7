"""The model that a server serves, in the endpoints' form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ostinato.engine.process.async_engine import AsyncEngine
from ostinato.sampling.guide import Guide
from ostinato.serve.body_workers.context import GuideTrial, RequestContext
from ostinato.serve.body_workers.pool import BodyWorkerPool
from ostinato.serve.chat.guides import GuideCompiler
from ostinato.serve.chat.text_support import ModelText
from ostinato.serve.http.streaming import LoopTurns
from ostinato.serve.settings import ServeSettings


@dataclass(frozen=True)
class ServedModel:
    """An engine and the work of its requests, made once and used on the event loop."""

    engine: AsyncEngine
    text: ModelText
    compiler: GuideCompiler
    work: RequestContext
    """Work for requests that are prepared on the event loop."""
    turns: LoopTurns = field(default_factory=LoopTurns)
    """Turns of the event loop for making long answers."""


def model_of(
    engine: AsyncEngine, settings: ServeSettings, model_name: str, workers: Callable[[], BodyWorkerPool] | None = None
) -> ServedModel:
    """Return the model of an engine; its guides are tried by `workers`, if there are any."""

    async def try_out(client: str, guide: Guide) -> None:
        assert workers is not None, "asked only if there are some"
        body = GuideTrial(guide=guide.model_dump_json())
        await workers().read(client, GuideTrial, body.model_dump_json().encode())

    max_model_len = engine.plan.settings.max_model_len
    text = ModelText(engine.tokenizer, engine.chat_template, engine.media, engine.vocab_size, max_model_len, settings)
    work = RequestContext(text, settings, model_name, engine.default_params)
    return ServedModel(engine, text, GuideCompiler(engine, try_out if workers else None), work)
