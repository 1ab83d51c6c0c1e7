"""The bodies of Ollama's API, and the conversations, prompts and sampling in them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from ostinato.json_io import JsonObject
from ostinato.sampling.params import SamplingParams
from ostinato.scheduler.limits import check_prompt_length
from ostinato.serve.api.embeddings import EmbeddingRequest
from ostinato.serve.api.generation_fields import GenerationBody, Prompts, check_model
from ostinato.serve.api.generation_run import ConversationRequest, PreparedChat, prepare_chat
from ostinato.serve.body_workers.context import RequestContext
from ostinato.serve.chat.conversation import (
    Conversation,
    FunctionCall,
    Message,
    ToolCall,
    check_counts,
    checked_tools,
    described,
    for_template,
    template_kwargs,
)
from ostinato.serve.chat.guides import GuideRequest, plain_guide
from ostinato.serve.http.api_errors import ApiError, field_error
from ostinato.serve.http.json_bodies import Body, EchoedBody, ListOf, unsupported_field
from ostinato.serve.http.unknown_fields import check_members
from ostinato.serve.settings import ServeSettings

LATEST = ":latest"
"""Tag that Ollama's clients add to a name without one."""
_PARAMETERS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repeat_penalty": "repetition_penalty",
    "stop": "stop",
}
"""Option -> sampling parameter of the same meaning."""

_IMAGE = re.compile(r"(messages\[\d+\])\.content(\[\d+\])")

Unused = Annotated[Any, Field(description="Accepted for Ollama's clients; the server's settings decide it.")]


def served_name(name: str | None, model_name: str, settings: ServeSettings) -> str | None:
    """Return the model's name as it is served, without a tag that a client added. ApiError for another model's."""
    if name is not None and name.endswith(LATEST) and name not in (settings.served_model_name or (model_name,)):
        name = name.removesuffix(LATEST)
    check_model(name, model_name, settings)
    return name


class Options(EchoedBody):
    """Ollama's options of a request. Those of the model's runner are settings of the server here."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_penalty: float | None = None
    """The repetition penalty, of all tokens before."""
    stop: str | ListOf[str] | None = None
    num_predict: int | None = Field(default=None, ge=-2)
    """Most tokens of output; -1 and -2: as many as there is room for."""
    num_ctx: int | None = Field(default=None, ge=1)
    """Most tokens of prompt and output together; at most the server's max_model_len."""
    repeat_last_n: Annotated[
        Literal[-1] | None, unsupported_field("repeat_penalty is of all tokens before, as with -1", but=-1)
    ] = None
    typical_p: Annotated[float | None, unsupported_field("give top_p or min_p", but=1.0)] = None
    tfs_z: Annotated[float | None, unsupported_field("give top_p or min_p", but=1.0)] = None
    mirostat: Annotated[Literal[0] | None, unsupported_field("give temperature and min_p", but=0)] = None
    mirostat_eta: Unused = None
    mirostat_tau: Unused = None
    penalize_newline: Annotated[
        Literal[True] | None, unsupported_field("penalties are of all tokens alike", but=True)
    ] = None
    num_keep: Unused = None
    num_batch: Unused = None
    num_gpu: Unused = None
    main_gpu: Unused = None
    num_thread: Unused = None
    low_vram: Unused = None
    numa: Unused = None
    use_mmap: Unused = None
    use_mlock: Unused = None

    def parameters(self) -> JsonObject:
        """Return the options that are sampling parameters, by the parameter's name."""
        return {ours: value for name, ours in _PARAMETERS.items() if (value := getattr(self, name)) is not None}

    def context(self, max_model_len: int) -> int | None:
        """Return `num_ctx`. ApiError if that is more than the server's context."""
        if self.num_ctx is None or self.num_ctx <= max_model_len:
            return self.num_ctx
        message = (
            f"options.num_ctx is {self.num_ctx}, and this server plans {max_model_len} tokens for a request; give at "
            f"most {max_model_len}, or, if the model can, start the server with --max-model-len {self.num_ctx}"
        )
        raise ApiError(400, message, param="options.num_ctx")


class OllamaBody(GenerationBody):
    """Fields of `/api/chat` and `/api/generate`. An answer is streamed unless `stream` is false."""

    options: Options | None = None
    format: Literal["json", ""] | JsonObject | None = None
    """The form of the answer after any thinking: `json` or a JSON schema."""
    think: bool | Literal["low", "medium", "high"] | None = None
    """Value of the chat template's enable_thinking, or its reasoning_effort."""
    keep_alive: Unused = None
    """Time that a model stays loaded: it stays as long as the server runs."""
    truncate: Annotated[Literal[False] | None, unsupported_field("a prompt that is too long is refused", but=False)] = (
        None
    )
    shift: Annotated[Literal[False] | None, unsupported_field("an output ends where the context does", but=False)] = (
        None
    )
    logprobs: Annotated[
        Literal[False] | None, unsupported_field("ask /v1/chat/completions or /v1/completions for them", but=False)
    ] = None
    top_logprobs: Annotated[
        Literal[0] | None, unsupported_field("ask /v1/chat/completions or /v1/completions for them", but=0)
    ] = None
    n: Annotated[None, unsupported_field("an answer is one message")] = None  # type: ignore[assignment]
    stream_options: Annotated[None, unsupported_field("a stream always ends with its counts")] = None  # type: ignore[assignment]

    def check(self, settings: ServeSettings, model_name: str, num_prompts: int = 1) -> None:
        self.model = served_name(self.model, model_name, settings)
        super().check(settings, model_name, num_prompts)

    def stop_strings(self) -> tuple[str, Sequence[str]]:
        options = self.options
        if options is None or options.stop is None:
            return super().stop_strings()
        return "options.stop", [options.stop] if isinstance(options.stop, str) else options.stop

    def sampling(self, defaults: SamplingParams, **more: object) -> SamplingParams:
        if self.options is not None:
            options = self.options.parameters()
            for name in options:
                if getattr(self, name, None) is not None:
                    raise field_error(name, "is given, and so is the option that means the same; give one")
            more |= options
        return super().sampling(defaults, **more)

    def parameter_fields(self) -> dict[str, str]:
        given = () if self.options is None else self.options.parameters()
        options = {ours: f"options.{name}" for name, ours in _PARAMETERS.items() if ours in given}
        return options | {"max_tokens": "options.num_predict"}

    def max_output(self) -> int | None:
        """Return the most tokens of output; None: as many as there is room for."""
        asked = None if self.options is None else self.options.num_predict
        if asked == 0:
            raise field_error("options.num_predict", "should be at least 1, or -1 for as many as there is room for")
        return asked if asked is not None and asked > 0 else None

    def within_context(self, prepared: PreparedChat, max_model_len: int, param: str) -> PreparedChat:
        """Return the request with its output cut to `num_ctx`; `param` is the field of its prompt.

        ApiError if that is more than the server's context.
        """
        num_ctx = None if self.options is None else self.options.context(max_model_len)
        if num_ctx is None:
            return prepared
        check_prompt_length(len(prepared.token_ids), num_ctx, param)
        room, asked = num_ctx - len(prepared.token_ids), prepared.params.max_tokens
        most = room if asked is None else min(room, asked)
        return replace(prepared, params=prepared.params.replace(max_tokens=most))

    def thinking(self) -> tuple[bool | None, str | None]:
        """Return (value of enable_thinking, reasoning effort) that the request asks for."""
        if isinstance(self.think, str):
            return True, self.think
        return self.think, None

    def _format_request(self) -> GuideRequest | None:
        if self.format in (None, ""):
            return None
        if self.format == "json":
            return GuideRequest("format", "json_object", True)
        return GuideRequest("format", "json_schema", self.format)


class OllamaCall(EchoedBody):
    function: JsonObject
    id: str | None = None
    type: Literal["function"] = "function"

    def to_call(self, where: str) -> ToolCall:
        """Return the call in OpenAI's form. ApiError, which names its place, if it is no call."""
        check_members(self.function, ("index", "name", "arguments"), f"{where}.function")
        name, arguments = self.function.get("name"), self.function.get("arguments", {})
        if not isinstance(name, str) or not isinstance(arguments, dict | str):
            raise field_error(f"{where}.function", "should have a name, and arguments that are an object")
        return ToolCall(id=self.id, function=FunctionCall(name=name, arguments=arguments))


class OllamaMessage(EchoedBody):
    role: Literal["system", "user", "assistant", "tool", "developer"]
    content: str | None = None
    thinking: str | None = None
    """Reasoning of an assistant. The template decides how it is used."""
    images: ListOf[str] | None = None
    """Images in base64."""
    tool_calls: ListOf[OllamaCall] | None = None
    tool_name: str | None = None
    """Name of the function that a tool's answer belongs to."""
    tool_call_id: str | None = None

    def to_message(self, where: str) -> Message:
        """Return the message in the form of chat completions; `where` is its place."""
        calls = [call.to_call(f"{where}.tool_calls[{i}]") for i, call in enumerate(self.tool_calls or ())]
        content = self.content if self.content is not None or calls else ""
        return Message(
            role=self.role,
            content=_with_images(content, self.images),
            name=self.tool_name,
            tool_calls=calls or None,
            tool_call_id=self.tool_call_id,
            reasoning_content=self.thinking,
        )


def _with_images(content: str | None, images: Sequence[str] | None) -> str | list[JsonObject] | None:
    """Return a message's content with images in base64 before its text."""
    if not images:
        return content
    parts: list[JsonObject] = [{"type": "image_url", "image_url": {"url": _data_url(image)}} for image in images]
    return [*parts, {"type": "text", "text": content}] if content else parts


def _data_url(image: str) -> str:
    """Return an image in base64 as a URL. Its type is found by its bytes, whatever the URL says."""
    return image if image.startswith("data:") else f"data:image/png;base64,{image}"


class OllamaChatRequest(OllamaBody):
    messages: ListOf[OllamaMessage] = Field(default_factory=list)
    """The conversation so far. Without one, the answer says that the model is loaded."""
    tools: ListOf[JsonObject] | None = None
    """Functions that the model may call."""
    tool_choice: str | JsonObject | None = None
    """Tools that the model may or must call, as in chat completions. Ollama has no such field."""

    def prepare(self, context: RequestContext) -> PreparedChat | None:
        """Return the conversation in the engine's form; None if there is none."""
        self.check(context.settings, context.model_name)
        if not self.messages:
            return None
        return self.prepared(context, self._messages(), self.tools)

    def _messages(self) -> list[Message]:
        return [message.to_message(f"messages[{i}]") for i, message in enumerate(self.messages)]

    def prepared(
        self, context: RequestContext, messages: Sequence[Message], tools: Any, param: str = "messages"
    ) -> PreparedChat:
        """Return a conversation in the engine's form; `param` is the field that it comes from."""
        text = context.text
        check_counts(messages, tools, context.settings)
        checked = checked_tools(text, tools, self.tool_choice)
        thinks, effort = self.thinking()
        if thinks and text.formats.reasoning is None:
            raise field_error("think", "is asked for, and this model's chat template shows no form of thinking")
        conversation = Conversation(
            for_template(messages, text.knows_developer),
            described(checked.offered_tools),
            template_kwargs(
                text,
                None,
                effort,
                thinks=thinks,
                tools=checked.offered_tools,
                effort_field="think",
                think_field="think",
            ),
            True,
            False,
        )
        asked = ConversationRequest(conversation, checked.callable, checked.choice, True, self.guide_request(), param)
        try:
            prepared = prepare_chat(context, asked, self, max_tokens=self.max_output(), logprobs=None)
        except ApiError as error:
            raise self._with_places(error) from None
        return self.within_context(prepared, text.max_model_len, param)

    def _with_places(self, error: ApiError) -> ApiError:
        """Return an error with the place of an image in this body: images stand before a message's text."""
        message, param = (_IMAGE.sub(self._image, text) for text in (error.message, error.param or ""))
        return ApiError(error.status, message, param=param or None, code=error.code, headers=error.headers)

    _image: ClassVar[str] = r"\1.images\2"


class OllamaGenerateRequest(OllamaChatRequest):
    model_config = ConfigDict(json_schema_extra={"required": ["prompt"]})

    _image: ClassVar[str] = r"images\2"
    prompt: str | None = None
    """The question. Without one, the answer says that the model is loaded."""
    system: str | None = None
    """A system message before it."""
    images: ListOf[str] | None = None
    """Images in base64."""
    raw: bool | None = None
    """Continue the prompt as it is, without the chat template."""
    messages: Annotated[None, unsupported_field("give them to /api/chat")] = None  # type: ignore[assignment]
    tools: Annotated[None, unsupported_field("give them to /api/chat")] = None
    tool_choice: Annotated[None, unsupported_field("tools go to /api/chat")] = None
    suffix: Annotated[Literal[""] | None, unsupported_field("a prompt is only continued at its end", but="")] = None
    template: Annotated[
        Literal[""] | None, unsupported_field("the server has one, --chat-template; or give raw", but="")
    ] = None
    context: Annotated[list[int] | None, unsupported_field("give the conversation so far to /api/chat", but=[])] = None

    def prepare(self, context: RequestContext) -> PreparedChat | None:
        self.check(context.settings, context.model_name)
        if not self.prompt and not self.images:
            return None
        if self.raw or not context.text.chat_template.has_default:
            return self._continued(context)
        return self.prepared(context, list(self._turns()), None, "prompt")

    def _turns(self) -> Iterator[Message]:
        if self.system:
            yield Message(role="system", content=self.system)
        yield Message(role="user", content=_with_images(self.prompt or "", self.images))

    def _continued(self, context: RequestContext) -> PreparedChat:
        """Return the prompt as it is: what raw asks for, and all that a model without a chat template takes."""
        why = "raw is asked for" if self.raw else "this model has no chat template"
        for name, value in (("system", self.system), ("images", self.images), ("think", self.think)):
            if value:
                raise field_error(name, f"cannot be used: {why}, so that the prompt is continued as it is")
        params = self.sampling(context.default_params, max_tokens=self.max_output())
        ids = context.encode(self.prompt or "", not self.raw, "prompt")
        check_prompt_length(len(ids), context.text.max_model_len, "prompt")
        guide = plain_guide(self.guide_request())
        self.check_guide(guide)
        prepared = PreparedChat(params, ids, None, (), False, True, False, guide, is_plain=True)
        return self.within_context(prepared, context.text.max_model_len, "prompt")


class OllamaEmbedRequest(EmbeddingRequest):
    """Fields of `/api/embed`."""

    truncate: bool | None = None
    """Cut an input that is too long (default: true)."""
    options: Options | None = None
    keep_alive: Unused = None
    encoding_format: Annotated[None, unsupported_field("vectors are lists of numbers")] = None  # type: ignore[assignment]

    def token_ids(self, context: RequestContext, given: Any, param: str) -> list[list[int]]:
        self.model = served_name(self.model, context.model_name, context.settings)
        for name in ("num_predict", *_PARAMETERS):
            if getattr(self.options, name, None) is not None:
                raise field_error(f"options.{name}", "has no effect on a vector; leave it out")
        num_ctx = None if self.options is None else self.options.context(context.text.max_model_len)
        if self.truncate is not False and self.truncate_prompt_tokens is None:
            self.truncate_prompt_tokens = num_ctx or -1
        inputs = super().token_ids(context, given, param)
        for ids in inputs:
            check_prompt_length(len(ids), num_ctx or context.text.max_model_len, param, has_output=False)
        return inputs


class OllamaEmbeddingRequest(OllamaEmbedRequest):
    """Fields of `/api/embeddings`, the older form with one input."""

    prompt: Prompts
    input: Annotated[None, unsupported_field("give prompt, or use /api/embed")] = None  # type: ignore[assignment]

    def prepare(self, context: RequestContext) -> list[list[int]]:
        if not isinstance(self.prompt, str):
            raise field_error("prompt", "should be a string; /api/embed takes several")
        return self.token_ids(context, self.prompt, "prompt")


class ShowRequest(Body):
    model: str | None = None
    name: str | None = None
    """The older name of the field model."""
    verbose: Unused = None
    system: Unused = None
    template: Unused = None
    options: Unused = None

    def prepare(self, context: RequestContext) -> str | None:
        """Return the name that is asked about."""
        return served_name(self.model or self.name, context.model_name, context.settings)
