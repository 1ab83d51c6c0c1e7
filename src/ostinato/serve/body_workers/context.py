"""Context of preparing a request, besides its body, on the event loop and in a worker alike.

The model in the endpoints' form.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from ostinato.engine.process.async_engine import AsyncEngine
from ostinato.engine.process.engine_messages import EngineStarted
from ostinato.engine.text.chat_template import DEFAULT_TEMPLATE_BUDGET, TemplateBudget
from ostinato.engine.text.tokenizer import load_tokenizer_and_template
from ostinato.errors import RequestError
from ostinato.media.media_input import load_media_input
from ostinato.sampling.grammar import GrammarCompiler
from ostinato.sampling.guide import Guide
from ostinato.sampling.params import SamplingParams
from ostinato.serve.body_workers.guide_trial import GuideTrial
from ostinato.serve.chat.guides import GuideCompiler
from ostinato.serve.chat.text_support import ModelText
from ostinato.serve.http.json_bodies import Body
from ostinato.serve.settings import ServeSettings

ON_LOOP = TemplateBudget(steps=10_000, seconds=0.01)
"""Budget of a template on the event loop."""
MAX_LOOP_CHARACTERS = 2**15
"""Longest text that is tokenised on the event loop, which takes some milliseconds."""


class NeedsWorker(Exception):
    """Raised on the event loop for a request that is too costly there; a worker prepares it instead."""


@dataclass(frozen=True)
class RequestContext:
    """Tokenizer, settings and defaults that preparing a request needs."""

    text: ModelText
    settings: ServeSettings
    model_name: str
    default_params: SamplingParams
    on_loop: bool = True
    grammars: GrammarCompiler | None = None
    """Compiler of guides that are tried, which only workers have."""

    @property
    def budget(self) -> TemplateBudget:
        """Budget of a template."""
        return ON_LOOP if self.on_loop else DEFAULT_TEMPLATE_BUDGET

    def require_worker(self) -> None:
        """Raise TooHeavy on the event loop."""
        if self.on_loop:
            raise NeedsWorker

    def encode(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        """Encode a text, as `ModelText.encode` does; TooHeavy for a long text on the event loop."""
        if len(text) > MAX_LOOP_CHARACTERS:
            self.require_worker()
        return self.text.encode(text, add_special_tokens, param)


@dataclass(frozen=True)
class WorkerContext:
    """Data that a worker makes its `RequestContext` from, sent as a message."""

    started: EngineStarted
    settings: ServeSettings
    """Settings of the server, without keys."""
    model_name: str
    remote: bool
    """True if images are fetched from URLs."""

    def work(self) -> RequestContext:
        started = self.started
        tokenizer, template = load_tokenizer_and_template(started.plan.settings, started.directory)
        media = load_media_input(started.directory, started.vision, tokenizer, started.plan, self.remote)
        max_model_len = started.plan.settings.max_model_len
        text = ModelText(tokenizer, template, media, started.vocab_size, max_model_len, self.settings)
        ends = [token for token in tokenizer.eos_token_ids if token < started.vocab_size]
        grammars = GrammarCompiler(tokenizer, started.vocab_size, ends)
        with suppress(RequestError):  # which each guide raises again
            grammars.prepare()  # here, so that all workers have it
        return RequestContext(
            text, self.settings, self.model_name, started.default_params, on_loop=False, grammars=grammars
        )


@dataclass(frozen=True)
class ServedModel:
    """An engine and the work of its requests, made once and used on the event loop."""

    engine: AsyncEngine
    text: ModelText
    compiler: GuideCompiler
    work: RequestContext
    """Work for requests that are prepared on the event loop."""


class BodyReader(Protocol):
    """Reader of bodies in worker processes: `BodyWorkerPool`."""

    async def read(self, client: str, kind: type[Body], sent: bytes) -> tuple[Body, Any]: ...


def model_of(
    engine: AsyncEngine, settings: ServeSettings, model_name: str, workers: Callable[[], BodyReader] | None = None
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
