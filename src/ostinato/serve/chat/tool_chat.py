"""Conversations with an LLM of this process in which the model calls Python functions.

Prompt, grammar and reading of calls are the server's. An error of a function goes back to the model as its result.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from importlib.util import module_from_spec, spec_from_file_location
from itertools import count
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic_core import ArgsKwargs

from ostinato.config_fields import is_count
from ostinato.engine.input_processor import PromptInput, single_params
from ostinato.engine.llm import LLM
from ostinato.engine.outputs import RequestOutput
from ostinato.errors import RequestError
from ostinato.files import is_file
from ostinato.json_io import JsonObject
from ostinato.sampling.params import SamplingParams
from ostinato.scheduler.batch import TokenLogprobs
from ostinato.serve.body_workers.context import RequestContext
from ostinato.serve.chat.answer_formats import AnswerDelta, AnswerLayout
from ostinato.serve.chat.chat_output import ChatOutput, arguments_of, joined
from ostinato.serve.chat.conversation import (
    Conversation,
    checked_tools,
    described,
    render,
    starts_in_reasoning,
    template_kwargs,
)
from ostinato.serve.chat.guides import answer_guide
from ostinato.serve.chat.text_support import ModelText
from ostinato.serve.http.api_errors import ApiError
from ostinato.serve.settings import ServeSettings
from ostinato.setting_names import plain_words

MAX_TOOL_ROUNDS = 8
"""Most times that one answer may call functions, each with the results of the time before."""


_WITHOUT_RESULT = inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction


class FunctionTool:
    """A Python function as a tool, which the model knows by its name, docstring and signature."""

    def __init__(self, function: Callable[..., object]) -> None:
        """Read the function's signature.

        RequestError if a parameter has no JSON schema, or no name that can be set, and for what returns no result: a
        generator, or a coroutine.
        """
        name = getattr(function, "__name__", None)
        if name is None or not callable(function):
            raise RequestError(f"a tool is a function that has a name, and not {function!r}; wrap it in one")
        self.name: str = name
        if any(returns_later(function) for returns_later in _WITHOUT_RESULT):
            raise RequestError(f"the function {self.name} cannot be a tool: its result comes later; return it at once")
        try:
            target: Any = function
            self._adapter: TypeAdapter[Any] = TypeAdapter(target)
            parameters = self._adapter.json_schema()
        except (PydanticUserError, NameError) as error:
            reason = str(error).partition("\n")[0]
            raise RequestError(f"the function {self.name} cannot be a tool: {reason}") from None
        if parameters.get("type") != "object":
            raise RequestError(f"the function {self.name} cannot be a tool: its parameters must have names")
        description = inspect.getdoc(function) or ""
        self.as_json: JsonObject = {
            "type": "function",
            "function": {"name": self.name, "description": description, "parameters": parameters},
        }

    def call(self, arguments: JsonObject) -> str:
        """Return the function's result as text, JSON unless it is a string; of an error, its kind and message."""
        try:
            result = self._adapter.validate_python(ArgsKwargs((), arguments))
            text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
            return text.encode(errors="replace").decode()  # names of files may hold what is no Unicode
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {plain_words(one)}" for one in error.errors())
            return f"error: {wrong}"
        except Exception as error:
            return f"error: {type(error).__name__}: {error}"


def load_functions(path: Path) -> list[Callable[..., object]]:
    """Run a Python file, and return its functions whose names do not begin with an underscore, in their order.

    RequestError if there is no such file, it fails, or it defines none.
    """
    spec = spec_from_file_location(f"ostinato_tools_{path.stem}", path) if is_file(path) else None
    if spec is None or spec.loader is None:
        raise RequestError(f"tools are functions of a Python file, such as examples/calculator.py, which {path} is not")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # its annotations are looked up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise RequestError(f"the tools of {path} cannot be loaded: {type(error).__name__}: {error}") from None
    functions: list[Callable[..., object]] = [
        value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == spec.name and not name.startswith("_")
    ]
    if not functions:
        raise RequestError(f"{path} defines no function whose name does not begin with an underscore")
    return functions


@dataclass(frozen=True)
class FunctionResult:
    """A call that the model made, and its result."""

    name: str
    arguments: str
    result: str


@dataclass
class ToolAnswer:
    """An answer, whole: the messages that it adds to the conversation, and the last output."""

    messages: list[JsonObject] = field(default_factory=list)
    output: RequestOutput | None = None
    rounds: int = 0
    """Times that the answer called functions."""
    is_whole: bool = False
    """False if it still called functions when `max_rounds` was reached."""


@dataclass(frozen=True)
class _Piece:
    """A part of an output for `ChatOutput`; the last one has the tokens, which end it."""

    text: str
    token_ids: Sequence[int] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: Sequence[TokenLogprobs | None] | None = None


class ToolChat:
    """Conversations with a model that calls Python functions until it answers.

        chat = ToolChat(LLM("demo"), [calculate])
        for piece in chat.answer([{"role": "user", "content": "Ava has 17 apples and buys 25 more. How many?"}]):
            print(piece)

    The functions run in this process with all its rights: give the model only those that may do no harm.
    """

    def __init__(
        self,
        llm: LLM,
        functions: Sequence[Callable[..., object]],
        *,
        tool_call_parser: str | None = None,
        max_rounds: int = MAX_TOOL_ROUNDS,
    ) -> None:
        """Offer the functions to the model; `tool_call_parser` names the form of calls, as for `ostinato serve`.

        RequestError if a function cannot be a tool, or the model takes no such tools; ConfigError for an unknown form.
        """
        if not is_count(max_rounds):
            raise RequestError(f"max_rounds must be a whole number of at least 1, not {max_rounds!r}")
        if not isinstance(llm, LLM) or not isinstance(functions, list | tuple):
            given = f"{type(llm).__name__} and {type(functions).__name__}"
            raise RequestError(f"ToolChat takes an LLM and a list of functions, and not {given}")
        self._llm, self._max_rounds = llm, max_rounds
        tools = list(map(FunctionTool, functions))
        self._functions = {tool.name: tool for tool in tools}
        engine, settings = llm.engine, ServeSettings(tool_call_parser=tool_call_parser)
        self._text = ModelText(
            engine.tokenizer,
            engine.chat_template,
            None,
            engine.spec.vocab_size,
            engine.plan.settings.max_model_len,
            settings,
        )
        if engine.media is not None:
            self._text.media = engine.media
        self._context = RequestContext(self._text, settings, "", engine.default_params(), on_loop=False)
        self._calls = count()
        with _plain_errors():
            self._tools = checked_tools(self._text, [tool.as_json for tool in tools], "auto")

    @property
    def names(self) -> list[str]:
        """Names of the functions."""
        return list(self._functions)

    @property
    def form(self) -> str:
        """Name of the form of calls, as `tool_call_parser` takes it."""
        form = self._text.formats.tools
        assert form is not None, "a model without a form takes no tools"
        return form.parser

    def answer(
        self, messages: Sequence[JsonObject], params: SamplingParams | None = None, **chat_template_kwargs: Any
    ) -> Generator[str | FunctionResult, None, ToolAnswer]:
        """Return a generator of the answer's text as it comes, and of each call with its result.

        Its value is the whole answer. Leaving it early aborts the request. RequestError if the prompt is refused.
        """
        answer, messages = ToolAnswer(), list(messages)
        params = single_params(params, None) or self._llm.engine.default_params()
        while answer.rounds < self._max_rounds:
            parts = yield from self._round([*messages, *answer.messages], params, chat_template_kwargs, answer)
            message: JsonObject = {"role": "assistant", "content": parts.content}
            if parts.reasoning:
                message["reasoning_content"] = parts.reasoning
            answer.messages.append(message)
            if not parts.tool_calls:
                answer.is_whole = True
                return answer
            answer.rounds += 1
            calls = [(f"call{next(self._calls):05}", call.name or "", call.arguments) for call in parts.tool_calls]
            message["tool_calls"] = [
                {"id": id, "type": "function", "function": {"name": name, "arguments": arguments_of(arguments)}}
                for id, name, arguments in calls
            ]
            for id, name, arguments in calls:
                result = self._functions[name].call(arguments_of(arguments))
                yield FunctionResult(name, arguments, result)
                answer.messages.append({"role": "tool", "tool_call_id": id, "name": name, "content": result})
        return answer

    def _round(
        self, messages: Sequence[JsonObject], params: SamplingParams, variables: JsonObject, answer: ToolAnswer
    ) -> Generator[str | FunctionResult, None, AnswerDelta]:
        """Yield the text of one output as it comes, and return its parts, joined."""
        text, tools = self._text, self._tools
        with _plain_errors():
            kwargs = template_kwargs(text, variables, None, tools=tools.offered_tools)
            conversation = Conversation(messages, described(tools.offered_tools), kwargs, True, False)
            rendered = render(self._context, conversation)
            inside = starts_in_reasoning(text.formats, conversation, rendered.text)
            layout = AnswerLayout(text.formats_with(tools.callable), tools.callable, inside, True, False)
            guide = answer_guide(text, layout, None, tools.choice)
        if guide is not None:
            params = params.replace(guide=guide.guide)
        if text.shows_tags(None):
            params = params.replace(skip_special_tokens=False)
        pieces = self._llm.stream_input(PromptInput.from_chat(rendered), params)
        reader, whole, held = ChatOutput(text, layout), AnswerDelta(), ""
        with closing(pieces):
            while True:
                try:
                    piece = next(pieces)
                except StopIteration as end:
                    answer.output = end.value
                    break
                # The last piece may have the text of the token that ends the answer.
                delta, held = reader.take(_Piece(held)), piece
                whole = joined(whole, delta)
                if shown := delta.reasoning + delta.content:
                    yield shown
        last = answer.output.outputs[0]
        delta = reader.take(_Piece(held, last.token_ids, last.finish_reason, last.stop_reason))
        if shown := delta.reasoning + delta.content:
            yield shown
        return joined(whole, delta)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise errors of the server's endpoints as those of the engine."""
    try:
        yield
    except ApiError as error:
        raise RequestError(error.message) from None
