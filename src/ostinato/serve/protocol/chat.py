"""`/v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ostinato.serve.http.errors import ApiError
from ostinato.serve.protocol.common import MAX_LOGPROBS, Generating, Ignored, unserved
from ostinato.serve.protocol.conversation import ConversationBody
from ostinato.serve.protocol.guides import ResponseFormat


class ChatRequest(Generating, ConversationBody):
    max_completion_tokens: int | None = Field(None, ge=1)
    """Most tokens of output, reasoning included (as many as there is room for)."""
    max_tokens: int | None = Field(None, ge=1)
    """The older name of max_completion_tokens."""
    logprobs: bool | None = None
    """Give the log-probability of every token of output, those of reasoning and tool calls included."""
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """With logprobs: also of so many most likely tokens."""
    response_format: ResponseFormat | None = None
    """The form of the answer behind any reasoning."""
    tool_choice: str | dict[str, Any] | None = None
    """`none` (the model is not told of tools), `auto`, `required`, or one function by name."""
    parallel_tool_calls: bool | None = None
    """False: at most one call; of an answer that was not forced to, the calls behind the first are dropped."""
    store: Literal[False] | None = None
    """Nothing is stored."""
    modalities: list[Literal["text"]] | None = None
    """Only text is served."""
    metadata: Ignored = None
    prediction: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    service_tier: Ignored = None
    functions: Annotated[None, unserved("use tools")] = None
    function_call: Annotated[None, unserved("use tool_choice")] = None
    audio: Annotated[None, unserved("only text is")] = None
    web_search_options: Annotated[None, unserved("give the model a tool that searches")] = None

    def max_output(self) -> int | None:
        """Most tokens of output. ApiError if the two names for it disagree."""
        new, old = self.max_completion_tokens, self.max_tokens
        if new is not None and old is not None and new != old:
            message = f"max_completion_tokens is {new} and max_tokens, which means the same, {old}; give one"
            raise ApiError(400, message, param="max_tokens")
        return old if new is None else new

    def num_logprobs(self) -> int | None:
        """Of how many most likely tokens log-probabilities are given; None: of no tokens at all."""
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None
