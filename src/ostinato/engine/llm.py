"""LLM: the engine for use from Python, by any number of threads."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Never, Self, Unpack

import numpy as np

from ostinato.config import EngineConfig
from ostinato.engine.core import EngineCore
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
    merge_params_alias,
    numbered,
    params_per_prompt,
    single_params,
)
from ostinato.engine.outputs import RequestOutput, decode_logprobs, note_failures, vectors_of
from ostinato.engine.progress import generation_progress, start_progress
from ostinato.engine.shared_engine import BlockingCall, SharedEngine
from ostinato.engine.text.chat_marks import TemplateChat
from ostinato.engine.text.tokenizer import Tokenizer
from ostinato.errors import ForkError
from ostinato.json_io import JsonObject
from ostinato.kv_cache.marks import DEFAULT_TTL
from ostinato.kv_cache.offload.save_restore import SAVE_PATIENCE
from ostinato.observe.logs import set_log_levels
from ostinato.other_engines import missing_attribute
from ostinato.plan.plan import Plan
from ostinato.plan.render.html import folded
from ostinato.sampling.params import SamplingParams
from ostinato.sampling.pooler import POOLING_PARAMS, EmbeddingOptions, PoolingKind

if TYPE_CHECKING:
    from ostinato.setting_types import LLMSettings


class LLM:
    r"""A model, ready to generate.

        llm = LLM("demo")
        [output] = llm.generate("Q: Ava has 17 apples and buys 25 more. How many has she?\nA:")
        print(output.outputs[0].text)

    Settings are those of EngineConfig. Any thread may call it, several at a time: their requests run in the same steps.
    `close`, or the end of a `with`, gives its memory back and saves the prefix cache, if `cache_dir` or `cache_offload`
    is given. An LLM that is not closed does so when it is garbage collected or the interpreter exits, within a minute;
    what was used last is saved first. A forked process cannot use an LLM, which is a ForkError.
    """

    def __init__(self, model: str = "demo", **settings: Unpack[LLMSettings]) -> None:
        """Load the model and capture its graphs. Raises ModelError, ConfigError or CapacityError."""
        set_log_levels()
        with start_progress() as progress:
            engine = EngineCore(EngineConfig(model=model, **settings), progress)
        self.plan: Plan = engine.plan
        """The plan, with what was measured at start-up."""
        self._model = model
        self._shared = SharedEngine(engine)
        self._end = weakref.finalize(self, _close_unclosed, self._shared)

    @property
    def engine(self) -> EngineCore:
        """The engine, for one thread at a time, as long as the LLM lives. RequestError once it is closed."""
        return self._shared.engine

    def close(self) -> None:
        """Free the memory and end the threads. Calls that wait, and later ones, raise RequestError."""
        engine = self._shared.close()
        self._end.detach()
        if engine is not None:
            engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Never:
        raise TypeError("an LLM cannot be pickled, as it has a loaded model; make one in the process that uses it")

    def __repr__(self) -> str:
        settings = self.plan.settings
        return (
            f"LLM({self._model!r}, {settings.dtype} on {self.plan.device.name}, max_num_seqs={settings.max_num_seqs}, "
            f"max_model_len={settings.max_model_len}{'' if self._end.alive else ', closed'})"
        )

    def _repr_html_(self) -> str:
        """Return the notebook view: the LLM, and its plan behind a click."""
        return f"<code>{escape(repr(self))}</code>{folded('plan', self.plan._repr_html_())}"

    def get_tokenizer(self) -> Tokenizer:
        """Return the checkpoint's tokenizer, with `encode`, `decode` and `eos_token_ids`. Any thread may use it."""
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of a request that brings none: those of generation_config.json, else greedy."""
        return self.engine.default_params()

    if not TYPE_CHECKING:  # a type checker knows the names that there are

        def __getattr__(self, name: str) -> Never:
            raise missing_attribute(self, name)

    @advised
    def generate(
        self,
        prompts: Prompts,
        params: Params = None,
        *,
        sampling_params: Params = None,
        cache_salt: str | None = None,
        checkpoints: Sequence[int] = (),
        checkpoint_ttl: float = DEFAULT_TTL,
    ) -> list[RequestOutput]:
        """Continue each prompt. Outputs come in the order of the prompts.

        A prompt is text, a list of token ids, or `{"prompt": text}` or `{"prompt_token_ids": ids}`; a single one needs
        no list around it. `params` (or `sampling_params`, as in vLLM) is for all, or one for each; without it,
        generation_config.json decides, and if that asks for no sampling the output is greedy. Only prompts of the same
        `cache_salt` share prefix cache entries. `checkpoints` are positions in tokens, at most 4, up to which later
        prompts will share all these prompts: a state is kept at the last block boundary at or before them, and pinned
        for `checkpoint_ttl` seconds from its last use on (`RequestOutput.cache.marks` says which were). Raises
        RequestError, before this call runs a step, if one of the prompts cannot be served. A prompt that fails while it
        runs does not end the others: its output has `finish_reason` "error" and `error`, and a line in the log names
        it. If all fail, the first one's error is raised.
        """
        inputs = PromptInput.parse_all(prompts, checkpoints, checkpoint_ttl)
        return self._generate(inputs, merge_params_alias(params, sampling_params), cache_salt)

    @advised
    def chat(
        self,
        messages: ConversationsInput,
        params: Params = None,
        *,
        sampling_params: Params = None,
        cache_salt: str | None = None,
        cache_breakpoints: Sequence[int | JsonObject] = (),
        **chat_template_kwargs: object,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several.

        A message is `{"role": ..., "content": ...}`, its content a text, or a list of parts `{"type": "text", "text":
        ...}`, `{"type": "image", "image": ...}` (a path, a URL, bytes, a PIL image), `{"type": "image_url",
        "image_url": {"url": ...}}` and `{"type": "video", "video": [frames], "fps": ...}`. The checkpoint's chat
        template makes the prompt, with `chat_template_kwargs` as its variables. `cache_breakpoints`, at most 4, say
        after which messages a state is kept and pinned, as `checkpoints` of `generate`: indices of messages, or
        `{"after": "system", "tools" or an index, "ttl": "1h" or seconds}`. Raises RequestError as `generate`, if the
        template refuses, if an image cannot be loaded, and if a breakpoint cannot be located in the prompt.
        """
        conversations, prompts = as_conversations(messages), list[PromptInput]()
        for conversation in conversations:
            with numbered(len(prompts), len(conversations)):
                prompts.append(self._render_chat(conversation, chat_template_kwargs, cache_breakpoints))
        return self._generate(prompts, merge_params_alias(params, sampling_params), cache_salt)

    @advised
    def embed(
        self,
        prompts: Prompts,
        *,
        pooling: PoolingKind | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        cache_salt: str | None = None,
    ) -> list[np.ndarray]:
        """Return a vector [hidden] float32 for each prompt: its last final hidden state, or the mean of all.

        `pooling` and `normalize` default to the checkpoint's modules.json, else to `last` and True: a vector of length
        1. `dimensions` keeps that number of first elements, again as a vector of length 1. Raises RequestError as
        `generate`, which has the forms of prompts too; PromptsFailed, with the other vectors as `outputs`, if some of
        the prompts fail while they run; ModelError if modules.json asks for what is not implemented.
        """
        engine = self.engine
        asked = EmbeddingOptions.resolve(engine.directory, engine.spec.hidden_size, pooling, normalize, dimensions)
        inputs = PromptInput.parse_all(prompts)
        outputs = self._generate(inputs, POOLING_PARAMS, cache_salt, asked.kind)
        return vectors_of(outputs, asked)

    @advised
    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        cache_salt: str | None = None,
    ) -> Generator[str, None, RequestOutput]:
        """Return a generator of the output's text, piece by piece as it is generated, never cut inside a character.

        Leaving the generator early aborts the request; its value is the whole output. Text needs a tokenizer; `n` must
        be 1. Raises RequestError at once, not at the first piece, if the prompt cannot be served.
        """
        return self.stream_input(PromptInput.parse(prompt), single_params(params, sampling_params), cache_salt)

    @advised
    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        cache_salt: str | None = None,
        **chat_template_kwargs: object,
    ) -> Generator[str, None, RequestOutput]:
        """Return a generator of the answer to a conversation, piece by piece; see `chat` and `stream`."""
        own_params = single_params(params, sampling_params)
        prompt = self._render_chat(as_conversation(messages), chat_template_kwargs)
        return self.stream_input(prompt, own_params, cache_salt)

    def reset_prefix_cache(self) -> bool:
        """Drop every prefix and every encoded image that no running request uses, so that new requests begin cold.

        False if some prefixes are in use (by a stream that is not over), and so can still be found.
        """
        with self._shared.between_steps() as engine:
            return engine.reset_prefix_cache()

    def save_traffic(self, path: str | Path) -> None:
        """Write shapes of batches and lengths of requests since the start as JSON, for `ostinato plan --traffic`.

        RequestError if the file cannot be written.
        """
        with self._shared.between_steps() as engine:
            engine.traffic().save(path)

    def stats(self) -> JsonObject:
        """Return the engine's counts since its start, as plain data."""
        with self._shared.between_steps() as engine:
            return engine.stats()

    def _render_chat(
        self,
        messages: Sequence[Message],
        chat_template_kwargs: dict[str, object],
        cache_breakpoints: Sequence[int | JsonObject] = (),
    ) -> PromptInput:
        engine = self.engine
        rendered = engine.render_chat_media(messages, **chat_template_kwargs)
        chat = TemplateChat(messages, engine.chat_template, engine.tokenizer, chat_template_kwargs)
        return PromptInput.from_chat(rendered, chat.place(cache_breakpoints, rendered))

    def _add(
        self,
        call: BlockingCall,
        prompt: PromptInput,
        params: SamplingParams | None,
        cache_salt: str | None,
        pooling: PoolingKind | None = None,
    ) -> str:
        with self._shared.between_steps() as engine:
            request_id = engine.add_request(
                prompt.prompt,
                params,
                add_special_tokens=prompt.add_special_tokens,
                cache_salt=cache_salt,
                media=prompt.media,
                pooling=pooling,
                marks=prompt.marks,
            )
            output = engine.output(request_id)
            assert output is not None, "the request has just been added"
            self._shared.track(call, request_id, output)
        return request_id

    def _generate(
        self, inputs: Sequence[PromptInput], params: Params, cache_salt: str | None, pooling: PoolingKind | None = None
    ) -> list[RequestOutput]:
        """Add a request for each prompt, and wait for all of them. What an error leaves unfinished is aborted."""
        all_params = params_per_prompt(params, len(inputs))
        call = self._shared.new_call()
        request_ids: list[str] = []
        try:
            for prompt, prompt_params in zip(inputs, all_params, strict=True):
                with numbered(len(request_ids), len(inputs)):
                    request_ids.append(self._add(call, prompt, prompt_params, cache_salt, pooling))
            self._wait_all(call)
        finally:
            self._shared.abandon(call)
        outputs = [call.finished[request_id] for request_id in request_ids]
        for output in outputs:
            decode_logprobs(output, self.get_tokenizer())
        note_failures(outputs)
        return outputs

    def _wait_all(self, call: BlockingCall) -> None:
        """Wait for all requests of a call."""
        counted: set[str] = set()
        with generation_progress(len(call.requests) + len(call.finished)) as advance:
            while call.requests:
                self._shared.wait_for_update(call)
                for request_id in call.finished.keys() - counted:
                    counted.add(request_id)
                    advance(sum(len(output.token_ids) for output in call.finished[request_id].outputs))

    def stream_input(
        self, prompt: PromptInput, params: SamplingParams | None, cache_salt: str | None = None
    ) -> Generator[str, None, RequestOutput]:
        """Return a generator as `stream` does, for a prompt that is rendered already."""
        call = self._shared.new_call(wants_text=True)
        request_id = self._add(call, prompt, params, cache_salt)
        pieces = self._stream_text(call, request_id)
        # Run to the first, empty piece: a generator that has not begun would not abort its request when left.
        next(pieces)
        return pieces

    def _stream_text(self, call: BlockingCall, request_id: str) -> Generator[str, None, RequestOutput]:
        """Yield an empty piece, then the text of a call's one request. The generator's value is the output."""
        num_yielded = 0
        try:
            yield ""
            while True:
                text = call.text
                if len(text) > num_yielded:
                    yield text[num_yielded:]
                    num_yielded = len(text)
                elif request_id in call.finished:
                    output = call.finished[request_id]
                    if output.error is not None:
                        raise output.error
                    decode_logprobs(output, self.get_tokenizer())
                    return output
                else:
                    self._shared.wait_for_update(call)
        finally:
            self._shared.abandon(call)


def _close_unclosed(shared: SharedEngine) -> None:
    """End the engine of an LLM that was not closed, unless this is a fork of the process that made it."""
    with suppress(ForkError):
        engine = shared.close()
        if engine is not None:
            engine.close(SAVE_PATIENCE)
