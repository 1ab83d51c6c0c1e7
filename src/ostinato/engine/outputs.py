"""Outputs of requests."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Never, Protocol

import numpy as np

from ostinato.errors import PromptsFailed
from ostinato.json_io import JsonObject
from ostinato.kv_cache.prefix_index import CacheReport
from ostinato.other_engines import missing_attribute
from ostinato.plan.render.html import table
from ostinato.sampling.pooler import EmbeddingOptions
from ostinato.scheduler.batch import DecodedLogprobs, TokenLogprobs

log = logging.getLogger("ostinato.engine")


class TokenTexts(Protocol):
    """Tokenizer that gives the text of one token (`LLM.get_tokenizer`)."""

    def decode_token(self, token_id: int, skip_special_tokens: bool) -> str: ...


@dataclass(slots=True)
class CompletionOutput:
    """One output of a request; a request with `n` samples has n of them."""

    index: int
    text: str = ""
    """Text so far. Empty without a tokenizer. It never ends inside a character or a possible stop string."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    """Log-probabilities, one entry per token, if `logprobs` was asked for; each has its `text`."""
    cumulative_logprob: float | None = None
    """Sum of the tokens' log-probabilities, if `logprobs` was asked for."""
    finish_reason: str | None = None
    """`stop`, `length`, `abort`, `moved` (to another engine) or `error`; None while the request is unfinished here."""
    stop_reason: int | str | None = None
    """Token id or stop string that ended the output, if `finish_reason` is `stop`.

    With `length`, it is `"max_model_len"` if the model's context ended the output before it had `max_tokens` tokens.
    """

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    if not TYPE_CHECKING:  # a type checker knows the names that there are

        def __getattr__(self, name: str) -> Never:
            raise missing_attribute(self, name)

    def to_dict(self, tokenizer: TokenTexts | None = None) -> JsonObject:
        """Return the output as plain data, ready for JSON. With a tokenizer, log-probabilities have their texts."""
        return {
            "index": self.index,
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "cumulative_logprob": self.cumulative_logprob,
            "logprobs": None if self.logprobs is None else [_logprobs(each, tokenizer) for each in self.logprobs],
        }

    def _repr_html_(self) -> str:
        """Return the notebook view."""
        return table(self._rows())

    def _rows(self) -> list[tuple[str, str]]:
        """Return its text, and how it ended, as rows of a table."""
        end = self.finish_reason or "unfinished"
        reason = "" if self.stop_reason is None else f" at {self.stop_reason!r}"
        return [(f"output {self.index}", self.text), ("", f"{len(self.token_ids):,} tokens; {end}{reason}")]


@dataclass(slots=True)
class RequestTimes:
    """Times of a request, in seconds of a monotonic clock."""

    arrival: float
    scheduled: float | None = None
    """Start of the first step that computes a part of the request."""
    first_token: float | None = None
    last_token: float | None = None

    def __reduce__(self) -> tuple[object, ...]:
        # Every output delta has one. This takes a third of the time of a dataclass's own pickling.
        return RequestTimes, (self.arrival, self.scheduled, self.first_token, self.last_token)


@dataclass(slots=True)
class RequestOutput:
    """All outputs of one request so far. The engine updates it in place until `finished`."""

    request_id: str
    prompt: str | None
    """Text of the prompt; None if it was given as token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    times: RequestTimes
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Log-probabilities, one entry per prompt token, if asked for; None for the first token, which follows nothing."""
    cache: CacheReport | None = None
    """Report on the prompt's prefix cache hit, and why it was not longer. None until the first update."""
    error: Exception | None = None
    """The exception, if an output's `finish_reason` is `error`."""
    embedding: np.ndarray | None = None
    """[hidden] float32, as the model gives it, if an embedding was asked for. The outputs then mean nothing."""

    def to_dict(self, tokenizer: TokenTexts | None = None) -> JsonObject:
        """Return the outputs as plain data, ready for JSON. With a tokenizer, log-probabilities have their texts."""
        scored = self.prompt_logprobs
        return {
            "request_id": self.request_id,
            "prompt": self.prompt,
            "prompt_token_ids": list(self.prompt_token_ids),
            "num_cached_tokens": self.num_cached_tokens,
            "outputs": [output.to_dict(tokenizer) for output in self.outputs],
            "prompt_logprobs": None if scored is None else [each and _logprobs(each, tokenizer) for each in scored],
            "error": None if self.error is None else str(self.error),
            "embedding": None if self.embedding is None else self.embedding.tolist(),
        }

    def _repr_html_(self) -> str:
        """Return the notebook view."""
        prompt = f"{len(self.prompt_token_ids):,} token ids" if self.prompt is None else self.prompt
        cached = "" if self.cache is None else f", {self.cache.cached_tokens:,} of them cached"
        rows = [("prompt", prompt), ("", f"{len(self.prompt_token_ids):,} tokens{cached}")]
        rows += [row for output in self.outputs for row in output._rows()]
        return table([*rows, *([("error", str(self.error))] if self.error is not None else [])])

    @property
    def num_cached_tokens(self) -> int | None:
        """Prompt tokens that came from the prefix cache; None until the first update."""
        return None if self.cache is None else self.cache.cached_tokens

    @property
    def finished(self) -> bool:
        return not any(output.finish_reason is None for output in self.outputs)

    if not TYPE_CHECKING:  # a type checker knows the names that there are

        def __getattr__(self, name: str) -> Never:
            raise missing_attribute(self, name)


def _logprobs(scored: TokenLogprobs, tokenizer: TokenTexts | None) -> JsonObject:
    """Return the log-probabilities of one position as plain data."""

    def entry(token_id: int, logprob: float) -> JsonObject:
        text = {} if tokenizer is None else {"text": tokenizer.decode_token(token_id, False)}
        return {"token_id": token_id, **text, "logprob": logprob}

    top = [entry(token_id, logprob) for token_id, logprob in scored.top]
    return {**entry(scored.token_id, scored.logprob), "rank": scored.rank, "top": top}


def decode_logprobs(output: RequestOutput, tokenizer: TokenTexts) -> None:
    """Give the log-probabilities of a finished output their texts, as the tokenizer decodes them."""
    decode = partial(tokenizer.decode_token, skip_special_tokens=False)

    def decoded(scored: TokenLogprobs) -> TokenLogprobs:
        return DecodedLogprobs(scored.token_id, scored.logprob, scored.rank, scored.top, decode=decode)

    for sample in output.outputs:
        if sample.logprobs is not None:
            sample.logprobs = list(map(decoded, sample.logprobs))
    if output.prompt_logprobs is not None:
        output.prompt_logprobs = [None if each is None else decoded(each) for each in output.prompt_logprobs]


def note_failures(outputs: Sequence[RequestOutput]) -> None:
    """Log which prompts of a call have failed. If all have, raise the first one's error: there is nothing to return."""
    failed = [number for number, output in enumerate(outputs, 1) if output.error is not None]
    if failed and len(failed) == len(outputs):
        raise outputs[0].error or AssertionError
    for number in failed:
        error = outputs[number - 1].error
        log.warning("prompt %d of %d failed, and its output has the error: %s", number, len(outputs), error)


def vectors_of(outputs: Sequence[RequestOutput], options: EmbeddingOptions) -> list[np.ndarray]:
    """Return the embeddings of a call. PromptsFailed, with the others, if there are none of some prompts."""
    vectors: list[np.ndarray | None] = []
    problems: dict[int, Exception] = {}
    for number, output in enumerate(outputs, 1):
        try:
            vectors.append(options.vector(output.embedding, output.error))
        except Exception as error:
            vectors.append(None)
            problems[number] = error
    if not problems:
        return [vector for vector in vectors if vector is not None]
    number, first = next(iter(problems.items()))
    if len(outputs) == 1:
        raise first
    message = f"{len(problems)} of {len(outputs)} prompts failed, the first of them prompt {number}: {first}"
    raise PromptsFailed(message, vectors) from first
