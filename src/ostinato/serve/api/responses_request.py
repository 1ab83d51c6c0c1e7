"""The body of `/v1/responses`, and its input as a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from ostinato.json_io import JsonObject
from ostinato.sampling.params import SamplingParams
from ostinato.serve.api.generation_fields import MAX_LOGPROBS, GenerationBody, num_logprobs
from ostinato.serve.api.generation_run import ConversationRequest, PreparedChat, compact, prepare_chat
from ostinato.serve.body_workers.context import RequestContext
from ostinato.serve.chat.cache_marks import read_breakpoints
from ostinato.serve.chat.conversation import (
    Conversation,
    FunctionCall,
    Message,
    Role,
    ToolCall,
    check_counts,
    checked_tools,
    described,
    one_for_template,
    template_kwargs,
    text_of,
)
from ostinato.serve.chat.guides import GuideRequest
from ostinato.serve.chat.tools import RESPONSES_SPELLING
from ostinato.serve.http.api_errors import ApiError, field_error
from ostinato.serve.http.json_bodies import Body, EchoedBody, Ignored, ListOf, unsupported_field
from ostinato.serve.http.streaming import chunks_of

_LOGPROBS = "message.output_text.logprobs"


@dataclass(frozen=True)
class PreparedResponse:
    """The conversation in the engine's form, and the part of the request that the response repeats."""

    chat: PreparedChat
    echo: list[bytes]
    """Members of a JSON object, in pieces."""


class InputItem(EchoedBody):
    """A message, a call of the model, the result of one, or the model's reasoning."""

    type: str = "message"
    role: Role | None = None
    content: str | ListOf[JsonObject] | None = None
    name: str | None = None
    arguments: str | None = None
    call_id: str | None = None
    output: str | ListOf[JsonObject] | None = None
    summary: Ignored = None
    id: Ignored = None
    status: Ignored = None
    phase: Ignored = None
    encrypted_content: Ignored = None


class TextFormat(Body):
    model_config = ConfigDict(serialize_by_alias=True)

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: JsonObject | None = Field(None, alias="schema")
    """The JSON schema of the output text."""
    strict: bool | None = None
    """The output follows the schema in any case."""


class TextConfig(Body):
    format: TextFormat | None = None
    verbosity: Annotated[None, unsupported_field("ask for it in the instructions")] = None


class ReasoningConfig(Body):
    effort: str | None = None
    """A variable of the chat template, reasoning_effort; `none` also sets its enable_thinking to false."""
    summary: Ignored = None
    generate_summary: Ignored = None


class ResponsesRequest(GenerationBody):
    input: str | ListOf[InputItem]
    """A user's text, or the conversation so far."""
    instructions: str | None = None
    """A system message before the input."""
    max_output_tokens: int | None = Field(None, ge=1)
    """Most tokens of output, reasoning included (as many as there is room for)."""
    text: TextConfig | None = None
    tools: ListOf[JsonObject] | None = None
    """Functions that the model may call."""
    tool_choice: str | JsonObject | None = None
    """Tools that the model may or must call.

    `none` (the model does not see the tools), `auto`, `required`, one function by name, or `allowed_tools`: the model
    sees all tools, and calls only the allowed ones.
    """
    parallel_tool_calls: bool | None = None
    """False: at most one call. Where calls are free, those after the first are dropped."""
    reasoning: ReasoningConfig | None = None
    chat_template_kwargs: JsonObject | None = None
    """Further variables of the chat template, such as enable_thinking."""
    metadata: dict[str, str] | None = None
    """Returned with the answer."""
    store: Annotated[Literal[False] | None, unsupported_field("nothing is stored", but=False)] = None
    """Nothing is stored."""
    background: Annotated[Literal[False] | None, unsupported_field("the client waits", but=False)] = None
    """The client waits for the answer."""
    truncation: Literal["disabled"] | None = None
    """Input that is too long is refused."""
    include: ListOf[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    """Additional data to return.

    `message.output_text.logprobs`: the log-probability of each token of a message. `reasoning.encrypted_content`
    changes nothing: reasoning is returned as plain text.
    """
    cache_breakpoints: ListOf[int | JsonObject] | None = None
    """Positions up to which later prompts will share this one, at most 4.

    Each is the index of an item of input, or `{"after": "system", "tools" or an index, "ttl": "5m", "1h" or seconds}`.
    A checkpoint is kept there, and pinned for its time.
    """
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """Number of the most likely tokens to return at each place; needs `include` to ask for log-probabilities."""
    n: Annotated[None, unsupported_field("a response has one output")] = None  # type: ignore[assignment]
    previous_response_id: Annotated[None, unsupported_field("nothing is stored; give the conversation as input")] = None
    conversation: Annotated[None, unsupported_field("nothing is stored; give the conversation as input")] = None
    prompt: Annotated[None, unsupported_field("nothing is stored; give the conversation as input")] = None
    max_tool_calls: Annotated[None, unsupported_field("no tool is built in")] = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    service_tier: Ignored = None

    def prepare(self, context: RequestContext) -> PreparedResponse:
        self.check(context.settings, context.model_name)
        if self.continuous_usage:
            param = "stream_options.continuous_usage_stats"
            raise ApiError(400, f"{param}: a response has its usage in its last event alone; leave it out", param=param)
        items = [] if isinstance(self.input, str) else self.input
        check_counts(items, self.tools, context.settings, "input")
        guide = self.guide_request()
        tools = checked_tools(context.text, self.nested_tools(), self.nested_choice(), RESPONSES_SPELLING)
        effort = None if self.reasoning is None else self.reasoning.effort
        messages, places = template_messages(self.input, self.instructions, context.text.knows_developer)
        conversation = Conversation(
            messages,
            described(tools.offered_tools),
            template_kwargs(
                context.text,
                self.chat_template_kwargs,
                effort,
                tools=tools.offered_tools,
                effort_field="reasoning.effort",
            ),
            add_generation_prompt=True,
            continue_final_message=False,
            places=places,
        )
        if self.cache_breakpoints:
            roles, message_of = [message["role"] for message in messages], {name: i for i, name in enumerate(places)}
            item_places = ["input"] if isinstance(self.input, str) else [f"input[{i}]" for i in range(len(items))]
            num_tools, of_items = len(conversation.tools or ()), [message_of.get(place) for place in item_places]
            marks = read_breakpoints(self.cache_breakpoints, roles, num_tools, of_items, "input items")
            conversation = replace(conversation, marks=marks)
        parallel = self.parallel_tool_calls is not False
        asked = ConversationRequest(conversation, tools.callable, tools.choice, parallel, guide, "input")
        most, is_asked = self.max_output_tokens, _LOGPROBS in (self.include or ())
        logprobs = num_logprobs(self.top_logprobs, is_asked, f'include to hold "{_LOGPROBS}"')
        chat = prepare_chat(context, asked, self, max_tokens=most, logprobs=logprobs)
        return PreparedResponse(chat.with_all_marks(), chunks_of(compact(self._echo(chat.params))[1:-1].encode()))

    def _echo(self, params: SamplingParams) -> JsonObject:
        """Return the members of a response that repeat what was asked for."""
        text_format = None if self.text is None else self.text.format
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "reasoning": {"effort": None if self.reasoning is None else self.reasoning.effort, "summary": None},
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_logprobs": self.top_logprobs or 0,
            "text": {"format": {"type": "text"} if text_format is None else text_format.model_dump(exclude_none=True)},
            "tool_choice": self.tool_choice or "auto",
            "tools": self.tools or [],
        }

    def parameter_fields(self) -> dict[str, str]:
        return {"max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}

    def _format_request(self) -> GuideRequest | None:
        """Return the guide that `text.format` asks for. ApiError for a type json_schema without a schema."""
        asked = None if self.text is None else self.text.format
        if asked is None or asked.type == "text":
            return None
        if asked.type == "json_object":
            return GuideRequest("text.format", "json_object", True)
        if asked.schema_ is None:
            raise field_error("text.format.schema", "should be given with the type json_schema")
        return GuideRequest("text.format.schema", "json_schema", asked.schema_)

    def nested_tools(self) -> list[JsonObject] | None:
        """Return the tools in the form of chat completions."""
        if self.tools is None:
            return None
        return [
            {"type": tool.get("type"), "function": {name: tool[name] for name in tool if name != "type"}}
            for tool in self.tools
        ]

    def nested_choice(self) -> object:
        """Return the tool choice in the form of chat completions."""
        match self.tool_choice:
            case {"type": "function", "name": name, **others} if not others:
                return {"type": "function", "function": {"name": name}}
            case {"type": "allowed_tools", "mode": mode, "tools": [*tools], **others} if not others:
                named = [
                    {"type": "function", "function": {"name": tool["name"]}}
                    for tool in tools
                    if isinstance(tool, dict) and tool.keys() == {"type", "name"}
                ]
                allowed = named if len(named) == len(tools) else tools
                return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
        return self.tool_choice


def template_messages(
    given: str | Sequence[InputItem], instructions: str | None, knows_developer: bool
) -> tuple[list[JsonObject], list[str]]:
    """Return the messages for a template, with their places in the body. ApiError, with the field, if not legal."""
    messages: list[JsonObject] = []
    places: list[str] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
        places.append("instructions")
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}], [*places, "input"]
    reasoning = ""
    for place, item in enumerate(given):
        where = f"input[{place}]"
        if item.type == "reasoning":
            reasoning += _reasoning(item, where)
            continue
        try:
            message = one_for_template(_message(item, where), where, knows_developer)
        except ApiError as error:
            made, own = _PLACES.get(item.type, ("", ""))
            raise error.renamed(where + made, where + own) from None
        last = messages[-1] if messages else {}
        if item.type == "function_call" and not reasoning and last.get("role") == "assistant":
            last.setdefault("tool_calls", []).extend(message["tool_calls"])
            continue
        if reasoning and message["role"] == "assistant":
            message["reasoning_content"], reasoning = reasoning, ""
        messages.append(message)
        places.append(where)
    return messages, places


_PLACES = {"function_call": (".tool_calls[0].function", ""), "function_call_output": (".content", ".output")}
"""Type of an item -> a place in the message that is made of it, and the same place in the item."""


def _message(item: InputItem, where: str) -> Message:
    if item.type == "message":
        if item.role is None:
            raise ApiError(400, f"{where} has no role", param=f"{where}.role")
        return Message(role=item.role, content=item.content)
    if item.type == "function_call":
        function = FunctionCall(name=_needed(item, "name", where), arguments=_needed(item, "arguments", where))
        return Message(role="assistant", tool_calls=[ToolCall(id=item.call_id, function=function)])
    if item.type == "function_call_output":
        output = _needed(item, "output", where)
        return Message(role="tool", content=output, tool_call_id=_needed(item, "call_id", where))
    raise field_error(f"{where}.type", "should be message, function_call, function_call_output or reasoning")


def _needed(item: InputItem, name: str, where: str) -> Any:
    value = getattr(item, name)
    if value is None:
        raise field_error(f"{where}.{name}", f"should be given with the type {item.type}")
    return value


def _reasoning(item: InputItem, where: str) -> str:
    if not isinstance(item.content, list):
        return item.content or ""
    parts = [{**part, "type": "text"} if part.get("type") == "reasoning_text" else part for part in item.content]
    return text_of(parts, f"{where}.content")
