"""`POST /v1/embeddings`: a vector of each text."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from fastapi import Request
from fastapi.responses import Response
from pydantic import Field

from ostinato.engine.process.async_engine import AsyncEngine
from ostinato.engine.process.request_streams import RequestStream
from ostinato.errors import DeadlineExceeded, ModelError, Overloaded
from ostinato.sampling.pooler import POOLING_PARAMS, EmbeddingOptions, PoolingKind
from ostinato.serve.api.generation_fields import Prompts, check_model, check_salt, prompts_in, token_ids
from ostinato.serve.api.generation_run import GenerationRun, ServedModel, joined, quoted, whole_response
from ostinato.serve.body_workers.context import RequestContext
from ostinato.serve.http.api_errors import ApiError, check_count, field_error
from ostinato.serve.http.json_bodies import Body, Ignored
from ostinato.serve.http.lifecycle import Lifecycle
from ostinato.serve.http.middleware import ApiRouter
from ostinato.serve.http.streaming import side_by_side

_KEPT = frozenset({"dimensions", "encoding_format", "normalize", "pooling", "priority", "timeout", "cache_salt"})


class EmbeddingRequest(Body):
    fields_after_prepare: ClassVar[frozenset[str]] = _KEPT
    generates: ClassVar[bool] = True

    input: Prompts
    """Text or token ids; several in a list."""
    model: str | None = None
    """The served model's name, or nothing."""
    encoding_format: Literal["float", "base64"] | None = None
    """`base64`: the vector as little-endian float32."""
    dimensions: int | None = Field(None, ge=1)
    """Number of the vector's first elements to return, scaled to length 1 again."""
    pooling: PoolingKind | None = None
    """The last hidden state, or the mean of all (as the checkpoint's modules.json asks, else `last`)."""
    normalize: bool | None = None
    """True if the vector is scaled to length 1 (as modules.json asks, else true)."""
    priority: int | None = None
    """Lower is served first, where the engine's scheduling_policy is priority."""
    timeout: float | None = Field(None, gt=0)
    """Seconds after which the request is ended."""
    cache_salt: str | None = None
    """Only requests of the same salt share the prefix cache."""
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    """Number of an input's first tokens to use; -1: as many as the model has room for."""
    user: Ignored = None

    def prepare(self, context: RequestContext) -> list[list[int]]:
        """Return the token ids of each input."""
        return self.token_ids(context, self.input, "input")

    def token_ids(self, context: RequestContext, given: Any, param: str) -> list[list[int]]:
        """Return the token ids of each input in `given`, the value of the field `param`."""
        check_model(self.model, context.model_name, context.settings)
        check_salt(self.cache_salt)
        inputs = prompts_in(given, param)
        check_count(param, "inputs", len(inputs), context.settings.max_inputs, "max_inputs")
        most_tokens = self.truncate_prompt_tokens
        if most_tokens == 0:
            raise field_error("truncate_prompt_tokens", "should be -1, or at least 1")
        if most_tokens == -1:
            most_tokens = context.text.max_model_len
        return [token_ids(context, each, param, has_output=False, most=most_tokens) for each in inputs]

    def asked(self, engine: AsyncEngine) -> EmbeddingOptions:
        """Return the pooling of the vectors. ApiError if the checkpoint asks for what is not implemented."""
        directory, size = engine.started.directory, engine.started.hidden_size
        try:
            return EmbeddingOptions.resolve(directory, size, self.pooling, self.normalize, self.dimensions)
        except ModelError as error:
            message = f"{error.message}; or give pooling and normalize"
            raise ApiError(400, message, param="pooling") from None


def embeddings_router(lifecycle: Lifecycle, served_model: Callable[[], ServedModel]) -> ApiRouter:
    router = ApiRouter()

    @router.post("/v1/embeddings", response_model=None)
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """Return a vector of each input: a hidden state of the model, behind its final norm."""
        model = served_model()
        inputs = EmbeddingRun(model.engine, body, request, lifecycle.settings.request_timeout)
        return await whole_response(request, inputs.run, inputs.answer(lifecycle.model_name), model.slices)

    return router


class EmbeddingRun:
    """Inputs of one request in the engine: no more at a time than may run, so that others are scheduled too."""

    def __init__(self, engine: AsyncEngine, body: EmbeddingRequest, request: Request, max_seconds: float) -> None:
        """Take the prepared inputs of `request`, which may run for its `timeout`, and no longer than `max_seconds`."""
        record = request.state.record
        prompts: Sequence[Sequence[int]] = request.state.prepared
        seconds = min(body.timeout or max_seconds, max_seconds)
        self.run, self._arrival = GenerationRun(), record.begun
        self._engine, self._prompts, self._body, self._client = engine, prompts, body, request.state.client
        self._asked = body.asked(engine)
        record.figures = self.run.figures
        self._seconds, self._until = seconds, asyncio.get_running_loop().time() + seconds
        self._places = iter(range(len(prompts)))
        self._vectors: dict[int, np.ndarray] = {}
        self._num_running = 0
        self._ended = asyncio.Event()

    async def compute(self) -> None:
        """Compute all inputs."""
        count = min(len(self._prompts), self._engine.plan.settings.max_num_seqs)
        await side_by_side(self._take_inputs() for _ in range(count))

    async def answer(self, model_name: str) -> Iterator[str]:
        """Compute all inputs, and return the parts of OpenAI's answer."""
        await self.compute()
        return self._parts(model_name)

    def vectors(self) -> Iterator[str]:
        """Yield the vectors as lists in JSON. All inputs must have been computed."""
        for place in range(len(self._prompts)):
            yield json.dumps(self._asked.vector(self._vectors[place]).tolist(), separators=(",", ":"))

    def _parts(self, model_name: str) -> Iterator[str]:
        yield '{"object":"list","data":['
        yield from joined([self._json(place, self._vectors[place])] for place in range(len(self._prompts)))
        tokens = self.run.usage()["prompt_tokens"]
        usage = f'{{"prompt_tokens":{tokens},"total_tokens":{tokens}}}'
        yield f'],"model":{quoted(model_name)},"usage":{usage}}}'

    async def _take_inputs(self) -> None:
        for place in self._places:
            stream = await self._submitted(self._prompts[place])  # closed with the run, which holds the vector
            self._num_running += 1
            try:
                self._vectors[place] = await self._vector(stream)
            finally:
                self._num_running -= 1
                self._ended.set()

    async def _submitted(self, prompt: Sequence[int]) -> RequestStream:
        """Submit one input; without room, wait for another of the request. Overloaded if none is computed."""
        body = self._body
        while True:
            left = self._until - asyncio.get_running_loop().time()
            if left <= 0:
                raise DeadlineExceeded(f"the request did not end within its deadline of {self._seconds:g} seconds")
            try:
                stream = await self._engine.submit(
                    prompt,
                    POOLING_PARAMS,
                    priority=body.priority or 0,
                    cache_salt=body.cache_salt,
                    deadline=left,
                    client=self._client,
                    pooling=self._asked.kind,
                    arrival=self._arrival,
                )
            except Overloaded:
                if not self._num_running:
                    raise
                self._ended.clear()
                await self._ended.wait()
            else:
                self.run.streams.append(stream)
                return stream

    @staticmethod
    async def _vector(stream: RequestStream) -> np.ndarray:
        vector: np.ndarray | None = None
        async for delta in stream:
            if delta.output is not None:
                vector = delta.output.embedding
        assert vector is not None, "a stream ends with its output, or with an error"
        return vector

    def _json(self, place: int, vector: np.ndarray) -> str:
        vector = self._asked.vector(vector)
        if self._body.encoding_format == "base64":
            written = f'"{base64.b64encode(vector.astype("<f4").tobytes()).decode()}"'
        else:
            written = json.dumps(vector.tolist(), separators=(",", ":"))
        return f'{{"object":"embedding","index":{place},"embedding":{written}}}'
