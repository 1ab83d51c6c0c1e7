"""AsyncLLM: a model for programs that run on asyncio."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import TYPE_CHECKING, Never, Self, Unpack

import numpy as np

from ostinato.config import EngineConfig
from ostinato.engine.input_processor import (
    ConversationsInput,
    Message,
    Params,
    Prompt,
    PromptInput,
    Prompts,
    advised,
    as_conversation,
    as_conversations,
    check_template_kwargs,
    merge_params_alias,
    numbered,
    params_per_prompt,
    single_params,
)
from ostinato.engine.outputs import RequestOutput, decode_logprobs, note_failures, vectors_of
from ostinato.engine.process.async_engine import AsyncEngine
from ostinato.engine.process.request_streams import RequestStream
from ostinato.engine.progress import start_progress
from ostinato.engine.text.chat_marks import TemplateChat
from ostinato.engine.text.tokenizer import Tokenizer
from ostinato.errors import ForkError, RequestError
from ostinato.json_io import JsonObject
from ostinato.kv_cache.marks import DEFAULT_TTL
from ostinato.media.media_input import render_chat
from ostinato.other_engines import missing_attribute
from ostinato.plan.plan import Plan
from ostinato.sampling.params import SamplingParams
from ostinato.sampling.pooler import POOLING_PARAMS, EmbeddingOptions, PoolingKind

if TYPE_CHECKING:
    from ostinato.setting_types import LLMSettings


class AsyncLLM:
    r"""A model, ready to generate, for one event loop. It runs in a separate process, so that no step blocks the loop.

        async with AsyncLLM("demo") as llm:
            async for piece in llm.stream("Q: Ava has 17 apples and buys 25 more. How many has she?\nA:"):
                print(piece, end="")

    Calls may overlap, as tasks do; their requests run in the same steps. A call that is cancelled ends its requests,
    and so does a stream that is left early (at once with `contextlib.aclosing`). Prompts, parameters and outputs are
    those of `LLM`.
    """

    def __init__(self, model: str = "demo", **settings: Unpack[LLMSettings]) -> None:
        """Check the settings; `start`, or `async with`, loads the model. ConfigError for an impossible setting."""
        self._config = EngineConfig(model=model, **settings)
        self._engine: AsyncEngine | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = os.getpid()

    async def start(self) -> Self:
        """Load the model. Raises ModelError, ConfigError or CapacityError; RequestError if it was started before."""
        if self._loop is not None:
            raise RequestError("this AsyncLLM was started before; make another one")
        self._loop = asyncio.get_running_loop()
        try:
            with start_progress() as progress:
                self._engine = await AsyncEngine.start(self._config, max_waiting=sys.maxsize, progress=progress)
        except BaseException:
            self._loop = None
            raise
        return self

    async def close(self) -> None:
        """End the unfinished requests, with EngineStopped, and the process; free its memory."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.stop()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __reduce__(self) -> Never:
        raise TypeError("an AsyncLLM cannot be pickled, as it has a loaded model; make one in the process that uses it")

    def __repr__(self) -> str:
        return f"AsyncLLM({self._config.model!r}, {'started' if self._engine is not None else 'not started'})"

    @property
    def plan(self) -> Plan:
        """The plan, with what was measured at start-up."""
        return self._started().plan

    def get_tokenizer(self) -> Tokenizer:
        """Return the checkpoint's tokenizer, with `encode`, `decode` and `eos_token_ids`."""
        return self._started().tokenizer

    if not TYPE_CHECKING:  # a type checker knows the names that there are

        def __getattr__(self, name: str) -> Never:
            raise missing_attribute(self, name)

    @advised
    async def generate(
        self,
        prompts: Prompts,
        params: Params = None,
        *,
        sampling_params: Params = None,
        cache_salt: str | None = None,
        checkpoints: Sequence[int] = (),
        checkpoint_ttl: float = DEFAULT_TTL,
    ) -> list[RequestOutput]:
        """Continue each prompt; see `LLM.generate`."""
        inputs = PromptInput.parse_all(prompts, checkpoints, checkpoint_ttl)
        return await self._run(inputs, merge_params_alias(params, sampling_params), cache_salt)

    @advised
    async def chat(
        self,
        messages: ConversationsInput,
        params: Params = None,
        *,
        sampling_params: Params = None,
        cache_salt: str | None = None,
        cache_breakpoints: Sequence[int | JsonObject] = (),
        **template_kwargs: object,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several; see `LLM.chat`."""
        conversations, prompts = as_conversations(messages), list[PromptInput]()
        for conversation in conversations:
            with numbered(len(prompts), len(conversations)):
                prompts.append(await self._rendered(conversation, template_kwargs, cache_breakpoints))
        return await self._run(prompts, merge_params_alias(params, sampling_params), cache_salt)

    @advised
    async def embed(
        self,
        prompts: Prompts,
        *,
        pooling: PoolingKind | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        cache_salt: str | None = None,
    ) -> list[np.ndarray]:
        """Return a vector [hidden] float32 for each prompt; see `LLM.embed`."""
        started = self._started().started
        asked = EmbeddingOptions.resolve(started.directory, started.hidden_size, pooling, normalize, dimensions)
        inputs = PromptInput.parse_all(prompts)
        outputs = await self._run(inputs, POOLING_PARAMS, cache_salt, asked.kind)
        return vectors_of(outputs, asked)

    @advised
    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[str, None]:
        """Return a generator of the output's text, piece by piece as it is generated, never cut inside a character.

        RequestError, at the first piece, if the prompt cannot be served.
        """
        return self._stream(PromptInput.parse(prompt), single_params(params, sampling_params), cache_salt)

    @advised
    async def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        cache_salt: str | None = None,
        **template_kwargs: object,
    ) -> AsyncGenerator[str, None]:
        """Yield the answer to a conversation, piece by piece; see `stream`."""
        own_params = single_params(params, sampling_params)
        prompt = await self._rendered(as_conversation(messages), template_kwargs)
        async with aclosing(self._stream(prompt, own_params, cache_salt)) as pieces:
            async for piece in pieces:
                yield piece

    async def stats(self) -> JsonObject:
        """Return the engine's counts since its start, as plain data."""
        return (await self._started().observe()).stats

    def _started(self) -> AsyncEngine:
        if os.getpid() != self._pid:
            raise ForkError(f"this AsyncLLM was made in process {self._pid}, and process {os.getpid()} is a fork of it")
        if self._engine is None:
            state = "is closed; make another one" if self._loop is not None else "is not started; use `async with`"
            raise RequestError(f"this AsyncLLM {state}")
        return self._engine

    def _on_its_loop(self) -> AsyncEngine:
        engine = self._started()
        if asyncio.get_running_loop() is not self._loop:
            raise RequestError("this AsyncLLM was started on another event loop; make one for each loop")
        return engine

    async def _rendered(
        self,
        messages: Sequence[Message],
        template_kwargs: JsonObject,
        cache_breakpoints: Sequence[int | JsonObject] = (),
    ) -> PromptInput:
        engine = self._on_its_loop()
        check_template_kwargs(template_kwargs, engine.chat_template)

        def render() -> PromptInput:
            rendered = render_chat(
                messages,
                lambda plain: engine.chat_template.render(plain, **template_kwargs),
                engine.media,
                template_kwargs,
            )
            chat = TemplateChat(messages, engine.chat_template, engine.tokenizer, template_kwargs)
            return PromptInput.from_chat(rendered, chat.place(cache_breakpoints, rendered))

        return await asyncio.to_thread(render)

    async def _submit(
        self,
        prompt: PromptInput,
        params: SamplingParams | None,
        cache_salt: str | None,
        pooling: PoolingKind | None = None,
    ) -> RequestStream:
        given = prompt.prompt if prompt.media is None else prompt.media.token_ids
        return await self._on_its_loop().submit(
            given,
            params,
            add_special_tokens=prompt.add_special_tokens,
            cache_salt=cache_salt,
            media=prompt.media,
            pooling=pooling,
            marks=prompt.marks,
        )

    async def _run(
        self, prompts: list[PromptInput], params: Params, cache_salt: str | None, pooling: PoolingKind | None = None
    ) -> list[RequestOutput]:
        all_params = params_per_prompt(params, len(prompts))
        streams: list[RequestStream] = []
        # Streams that are left early end their requests.
        async with AsyncExitStack() as stack:
            for prompt, prompt_params in zip(prompts, all_params, strict=True):
                with numbered(len(streams), len(prompts)):
                    stream = await self._submit(prompt, prompt_params, cache_salt, pooling)
                streams.append(await stack.enter_async_context(stream))
            outputs = [await _whole(stream, prompt) for stream, prompt in zip(streams, prompts, strict=True)]
        tokenizer = self.get_tokenizer()
        for output in outputs:
            if output.prompt_logprobs is not None or any(sample.logprobs is not None for sample in output.outputs):
                await asyncio.to_thread(decode_logprobs, output, tokenizer)  # they may be a million
        note_failures(outputs)
        return outputs

    async def _stream(
        self, prompt: PromptInput, params: SamplingParams | None, cache_salt: str | None
    ) -> AsyncGenerator[str, None]:
        async with await self._submit(prompt, params, cache_salt) as stream:
            async for delta in stream:
                for sample in delta.samples:
                    if sample.text:
                        yield sample.text


async def _whole(stream: RequestStream, prompt: PromptInput) -> RequestOutput:
    """Return the whole output of a request once it has ended. The error of a failed one is in its output."""
    output: RequestOutput | None = None
    try:
        async for delta in stream:
            output = delta.output or output
    except Exception:
        if output is None or output.error is None:
            raise
    assert output is not None, "a stream ends with its output, or with an error"
    output.prompt = prompt.prompt if isinstance(prompt.prompt, str) else None
    return output
