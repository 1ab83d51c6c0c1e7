"""The context in which a request is prepared besides its body, the same on the event loop and in a worker."""

from __future__ import annotations

import json
import math
import resource
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from ostinato.child_process import run_in_fork
from ostinato.engine.process.engine_messages import EngineStarted
from ostinato.engine.text.chat_template import TemplateTooExpensive
from ostinato.engine.text.template_sandbox import DEFAULT_TEMPLATE_BUDGET, TemplateBudget, weight
from ostinato.engine.text.tokenizer import load_tokenizer_and_template
from ostinato.errors import RequestError
from ostinato.media.media_input import load_media_input
from ostinato.sampling.grammar import GrammarCompiler
from ostinato.sampling.guide import Guide
from ostinato.sampling.params import SamplingParams
from ostinato.serve.chat.text_support import ModelText
from ostinato.serve.http.json_bodies import Body
from ostinato.serve.settings import ServeSettings

ON_LOOP = TemplateBudget(steps=10_000, seconds=0.01, uncounted=False)
"""Budget of a template on the event loop."""
MAX_LOOP_MESSAGES = 128
"""Longest conversation that is rendered on the event loop, which takes some 20 us for a message."""
_IN_FORK = TemplateBudget(steps=2**62, seconds=math.inf)
FORK_SECONDS, FORK_MEMORY = 0.3, 100 * 2**20
"""Seconds of the processor, and bytes, that a template may take in a worker for a short conversation."""
_SECONDS_PER_CHARACTER, _BYTES_PER_CHARACTER = 1e-6, 32
"""Seconds and bytes that a template may take on top, for each character of the conversation."""
MAX_LOOP_CHARACTERS = 2**13
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
    forks: bool = False
    """True in a worker, which renders a template in a fork of itself if a budget of steps does not suffice."""
    grammars: GrammarCompiler | None = None
    """Compiler of guides that are tried, in a worker alone."""

    def run_template(self, render: Callable[..., str], conversation: Sequence[Any]) -> str:
        """Return the result of `render`, called with a budget. TemplateTooExpensive if that takes more than it may.

        `conversation` is all that the template is given, messages first: what it may take in a worker grows with that.
        """
        if self.on_loop and len(conversation[0]) > MAX_LOOP_MESSAGES:
            raise NeedsWorker
        if not self.forks:
            return render(budget=ON_LOOP if self.on_loop else DEFAULT_TEMPLATE_BUDGET)
        size = weight(conversation, 2**62)
        seconds, memory = FORK_SECONDS + size * _SECONDS_PER_CHARACTER, FORK_MEMORY + size * _BYTES_PER_CHARACTER
        begin = time.thread_time()
        with suppress(TemplateTooExpensive):  # without a fork, which takes milliseconds
            return render(budget=TemplateBudget(50_000 + size // 2, seconds, uncounted=False))
        left = max(seconds / 4, seconds - (time.thread_time() - begin))
        try:
            return run_in_fork(partial(render, budget=_IN_FORK), left, memory)
        except (TimeoutError, MemoryError, TemplateTooExpensive):
            most = f"{seconds:.1f} seconds of the processor or {memory >> 20} MiB"
            message = f"the chat template takes more than {most} for this conversation, or makes too long a text"
            raise TemplateTooExpensive(message) from None

    def require_worker(self) -> None:
        """Raise NeedsWorker on the event loop."""
        if self.on_loop:
            raise NeedsWorker

    def encode(self, text: str, add_special_tokens: bool, param: str, has_output: bool = True) -> list[int]:
        """Encode a text, as `ModelText.encode` does; NeedsWorker for a long text on the event loop."""
        if len(text) > MAX_LOOP_CHARACTERS:
            self.require_worker()
        return self.text.encode(text, add_special_tokens, param, has_output)


@dataclass(frozen=True)
class WorkerContext:
    """Data that a worker makes its `RequestContext` from, sent as a message."""

    started: EngineStarted
    settings: ServeSettings
    """Settings of the server, without keys."""
    model_name: str
    remote: bool
    """True if images are fetched from URLs."""

    def text(self) -> ModelText:
        """Load the tokenizer, the chat template and what images need."""
        started = self.started
        tokenizer, template = load_tokenizer_and_template(started.plan.settings, started.directory)
        media = load_media_input(started.directory, started.vision, tokenizer, started.plan, self.remote)
        max_model_len = started.plan.settings.max_model_len
        return ModelText(tokenizer, template, media, started.vocab_size, max_model_len, self.settings)

    def loop_context(self) -> RequestContext:
        """Return the context for requests that are prepared on an event loop."""
        return RequestContext(self.text(), self.settings, self.model_name, self.started.default_params)

    def request_context(self) -> RequestContext:
        """Return the context of a worker process."""
        started, text = self.started, self.text()
        tokenizer = text.tokenizer
        grammars = GrammarCompiler(tokenizer, started.vocab_size, tokenizer.end_tokens(started.vocab_size))
        with suppress(RequestError):  # which each guide raises again
            grammars.prepare()  # here, so that all workers have it
        return RequestContext(
            text, self.settings, self.model_name, started.default_params, False, forks=True, grammars=grammars
        )


class GuideTrial(Body):
    """A guide as a body that a worker reads; preparing it is the trial."""

    guide: str
    """Fields of Guide as JSON, which has been checked."""

    def prepare(self, context: RequestContext) -> None:
        """Compile the guide and take its first tokens. RequestError if that cannot be done."""
        assert context.grammars is not None, "guides are tried in workers"
        # The hard limit has room for the stack of the compiling thread, which stays mapped after the thread has ended.
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        context.grammars.try_out(Guide.model_construct(**json.loads(self.guide)))
