"""`/v1/responses`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from ostinato.serve.http.errors import ApiError
from ostinato.serve.protocol.common import MAX_LOGPROBS, MAX_MESSAGES, Body, Generating, Ignored, Several, unserved
from ostinato.serve.protocol.guides import Wish
from ostinato.serve.protocol.input_items import InputItem

_LOGPROBS = "message.output_text.logprobs"


class TextFormat(Body):
    model_config = ConfigDict(serialize_by_alias=True)

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    """The JSON schema of the output text."""
    strict: bool | None = None
    """The output follows the schema whatever this is."""


class TextConfig(Body):
    format: TextFormat | None = None
    verbosity: Annotated[None, unserved("ask for it in the instructions")] = None


class ReasoningConfig(Body):
    effort: str | None = None
    """A variable of the chat template, reasoning_effort; `none` also sets its enable_thinking to false."""
    summary: Ignored = None
    generate_summary: Ignored = None


class ResponsesRequest(Generating):
    input: str | Annotated[Several[InputItem], Field(max_length=MAX_MESSAGES)]
    """A user's text, or the conversation so far."""
    instructions: str | None = None
    """A system message before the input."""
    max_output_tokens: int | None = Field(None, ge=1)
    """Most tokens of output, reasoning included (as many as there is room for)."""
    text: TextConfig | None = None
    tools: Several[dict[str, Any]] | None = None
    """Functions that the model may call."""
    tool_choice: str | dict[str, Any] | None = None
    """`none` (the model is not told of tools), `auto`, `required`, or one function by name."""
    parallel_tool_calls: bool | None = None
    """False: at most one call; of an answer that was not forced to, the calls behind the first are dropped."""
    reasoning: ReasoningConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template, such as enable_thinking."""
    metadata: dict[str, str] | None = None
    """Given back with the answer."""
    store: Literal[False] | None = None
    """Nothing is stored."""
    background: Literal[False] | None = None
    """An answer is given while its client waits."""
    truncation: Literal["disabled"] | None = None
    """Input that is too long is refused."""
    include: Several[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    """`message.output_text.logprobs`: give the log-probability of each token of a message.
    `reasoning.encrypted_content` changes nothing: reasoning is given in plain text."""
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """With those log-probabilities: also of so many most likely tokens."""
    n: Annotated[None, unserved("a response has one output")] = None  # type: ignore[assignment]
    previous_response_id: Annotated[None, unserved("nothing is stored; give the conversation as input")] = None
    conversation: Annotated[None, unserved("nothing is stored; give the conversation as input")] = None
    prompt: Annotated[None, unserved("nothing is stored; give the conversation as input")] = None
    max_tool_calls: Annotated[None, unserved("no tool is built in")] = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    service_tier: Ignored = None

    def format_wish(self) -> Wish | None:
        """The form of the output text. ApiError for a type json_schema without a schema."""
        asked = None if self.text is None else self.text.format
        if asked is None or asked.type == "text":
            return None
        if asked.type == "json_object":
            return Wish("text.format", "json_object", True)
        if asked.schema_ is None:
            message = "text.format.schema should be given with the type json_schema"
            raise ApiError(400, message, param="text.format.schema")
        return Wish("text.format", "json_schema", asked.schema_)

    def num_logprobs(self) -> int | None:
        """Of how many most likely tokens log-probabilities are given; None: of no tokens at all."""
        if _LOGPROBS in (self.include or ()):
            return self.top_logprobs or 0
        if self.top_logprobs:
            message = f'top_logprobs needs include to hold "{_LOGPROBS}"'
            raise ApiError(400, message, param="top_logprobs")
        return None

    def nested_tools(self) -> list[dict[str, Any]] | None:
        """The tools in the form of chat completions."""
        if self.tools is None:
            return None
        return [
            {"type": tool.get("type"), "function": {name: tool[name] for name in tool if name != "type"}}
            for tool in self.tools
        ]

    def nested_choice(self) -> Any:
        """The tool choice in the form of chat completions."""
        match self.tool_choice:
            case {"type": "function", "name": name, **others} if not others:
                return {"type": "function", "function": {"name": name}}
        return self.tool_choice
