"""LLM: the engine for use from Python, one call at a time."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, SupportsIndex, cast

from ostinato.config import EngineConfig
from ostinato.engine.engine import Engine
from ostinato.engine.outputs import RequestOutput
from ostinato.engine.progress import generation_progress, start_progress
from ostinato.errors import RequestError
from ostinato.media.prompt import MediaPrompt
from ostinato.plan.plan import Plan
from ostinato.sample.params import SamplingParams

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class _Prompt(NamedTuple):
    """What the engine is given of a prompt."""

    prompt: Prompt
    add_special_tokens: bool = True
    media: MediaPrompt | None = None


class LLM:
    """A model, ready to generate.

        llm = LLM("demo")
        [output] = llm.generate("Q: Ava has 17 apples and buys 25 more. How many has she?\\nA:")
        print(output.outputs[0].text)

    Settings are those of EngineConfig. Raises ModelError, ConfigError or CapacityError.
    """

    def __init__(self, model: str = "demo", **settings: Any) -> None:
        with start_progress() as progress:
            self.engine = Engine(EngineConfig(model=model, **settings), progress)

    @property
    def plan(self) -> Plan:
        """What was decided, and what was measured at start-up."""
        return self.engine.plan

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Continues each prompt; outputs come in the order of the prompts.

        A prompt is text or a list of token ids, and one alone needs no list around it. `params` is for all, or
        one for each; without it, generation_config.json decides, and where that asks for no sampling the output
        is greedy. Only prompts of the same `cache_salt` share what the prefix cache holds. Raises RequestError,
        before anything runs, if one of the prompts cannot be served.
        """
        listed = _as_list(prompts)
        return self._run([_Prompt(prompt) for prompt in listed], params, cache_salt)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | None = None,
        **chat_template_kwargs: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation, or each of several.

        A message is `{"role": ..., "content": ...}`, its content a text, or a list of parts `{"type": "text", "text":
        ...}`, `{"type": "image", "image": ...}` (a path, a URL, bytes, a PIL image), `{"type": "image_url",
        "image_url": {"url": ...}}` and `{"type": "video", "video": [frames], "fps": ...}`. The checkpoint's chat
        template makes the prompt; `chat_template_kwargs` are handed to it. Raises RequestError as `generate`, if the
        template refuses, and if an image cannot be taken.
        """
        if isinstance(messages, Mapping):
            raise RequestError("a conversation is a list of messages; put the one message into a list")
        alone = not messages or isinstance(messages[0], Mapping)
        conversations = cast(Sequence[Sequence[Message]], [messages] if alone else messages)
        prompts = [self._rendered(conversation, chat_template_kwargs) for conversation in conversations]
        return self._run(prompts, params, cache_salt)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, cache_salt: str | None = None
    ) -> Generator[str, None, RequestOutput]:
        """The output's text, piece by piece as it is generated, never cut inside a character.

        Leaving the generator early aborts the request; its value is the whole output. Text needs a tokenizer;
        `n` must be 1. Raises RequestError at once, not at the first piece, if the prompt cannot be served.
        """
        return self._stream(_Prompt(prompt), params, cache_salt)

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        **chat_template_kwargs: Any,
    ) -> Generator[str, None, RequestOutput]:
        """The answer to a conversation, piece by piece; see `chat` and `stream`."""
        return self._stream(self._rendered(messages, chat_template_kwargs), params, cache_salt)

    def reset_prefix_cache(self) -> bool:
        """Forgets every prefix and every encoded image that no running request holds, so that what comes next begins
        cold. False if some prefixes are held (by a stream that is not over), and so can still be found."""
        return self.engine.reset_prefix_cache()

    def save_traffic(self, path: str | Path) -> None:
        """Writes the histogram of the batches since the start as JSON, for `ostinato plan --traffic`. RequestError if
        the file cannot be written."""
        try:
            self.engine.runner.graphs.counts.traffic.save(Path(path))
        except OSError as error:
            raise RequestError(f"the traffic cannot be written to {path}: {error.strerror}") from None

    def stats(self) -> dict[str, Any]:
        """What the engine has done since its start, as plain data."""
        return self.engine.stats()

    def _rendered(self, messages: Sequence[Message], chat_template_kwargs: dict[str, Any]) -> _Prompt:
        text, media = self.engine.render_chat_media(messages, **chat_template_kwargs)
        return _Prompt(text, False, media)

    def _add(self, prompt: _Prompt, params: SamplingParams | None, cache_salt: str | None) -> str:
        return self.engine.add(
            prompt.prompt,
            params,
            add_special_tokens=prompt.add_special_tokens,
            cache_salt=cache_salt,
            media=prompt.media,
        )

    def _run(
        self,
        prompts: list[_Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        cache_salt: str | None,
    ) -> list[RequestOutput]:
        each = _one_each(params, len(prompts))
        ids: list[str] = []
        try:
            for prompt, own_params in zip(prompts, each, strict=True):
                try:
                    ids.append(self._add(prompt, own_params, cache_salt))
                except RequestError as error:
                    if len(prompts) == 1:
                        raise
                    which = f"prompt {len(ids) + 1} of {len(prompts)}"
                    raise RequestError(f"{which}: {error.message}", error.remedies) from error
            outputs = self._finish(set(ids))
        except BaseException:
            for request_id in ids:
                self.engine.abort(request_id)
            raise
        for output in outputs.values():
            if output.error is not None:
                raise output.error
        return [outputs[request_id] for request_id in ids]

    def _finish(self, ids: set[str]) -> dict[str, RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        with generation_progress(len(ids)) as advance:
            while len(finished) < len(ids):
                for output in self.engine.step():
                    if output.finished and output.request_id in ids:
                        finished[output.request_id] = output
                        advance(sum(len(each.token_ids) for each in output.outputs))
        return finished

    def _stream(
        self, prompt: _Prompt, params: SamplingParams | None, cache_salt: str | None
    ) -> Generator[str, None, RequestOutput]:
        if params is not None and params.n != 1:
            raise RequestError(f"stream gives one output, and n is {params.n}; use generate for several")
        request_id = self._add(prompt, params, cache_salt)
        pieces = self._pieces(request_id)
        # Up to its first, empty piece: a generator that has not begun would not abort its request when it is left.
        next(pieces)
        return pieces

    def _pieces(self, request_id: str) -> Generator[str, None, RequestOutput]:
        """The text of a request that was added, after an empty piece."""
        # Looked at where it lies, and not awaited from `step`: another call may run steps between two pieces.
        output = self.engine.output(request_id)
        assert output is not None
        given = 0
        try:
            yield ""
            while True:
                if output.error is not None:
                    raise output.error
                text = output.outputs[0].text
                if len(text) > given:
                    yield text[given:]
                    given = len(text)
                elif output.finished:
                    return output
                else:
                    self.engine.step()
        finally:
            self.engine.abort(request_id)


def _as_list(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One prompt is a string, or token ids (of any integer type), which an empty list is as well."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes | Mapping) or not isinstance(prompts, Iterable):
        raise RequestError(
            f"a prompt is text or a list of token ids, and several come in a list, not as a {type(prompts).__name__}"
        )
    items: list[Any] = list(prompts)
    # A row of an array has `__index__`, too, and is a prompt.
    if all(isinstance(item, SupportsIndex) and getattr(item, "ndim", 0) == 0 for item in items):
        return [items]
    return items


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, list | tuple) or not all(isinstance(each, SamplingParams | None) for each in params):
        raise RequestError(f"params should be SamplingParams or a list of them, one for each prompt, not {params!r}")
    if len(params) != count:
        raise RequestError(f"{count} prompts came with {len(params)} sampling parameters; give one, or one for each")
    return params
