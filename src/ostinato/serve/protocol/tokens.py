"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ostinato.serve.http.errors import ApiError
from ostinato.serve.protocol.common import MAX_MESSAGES, Body, Several
from ostinato.serve.protocol.conversation import ConversationBody
from ostinato.serve.protocol.messages import Message


class TokenizeRequest(ConversationBody):
    """Text as `/v1/completions` takes it, or a conversation as `/v1/chat/completions` does."""

    model: str | None = None
    """The served model's name, or nothing."""
    prompt: str | None = None
    messages: Annotated[Several[Message], Field(max_length=MAX_MESSAGES)] | None = None  # type: ignore[assignment]
    add_special_tokens: bool | None = None
    """Also the tokens that the tokenizer puts around a text (for a prompt true, for a conversation false)."""
    return_token_strs: bool = False
    """Also the text of each token."""

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "give either a prompt or messages", param="prompt")


class DetokenizeRequest(Body):
    model: str | None = None
    """The served model's name, or nothing."""
    tokens: Several[int] = Field(max_length=2**20)
