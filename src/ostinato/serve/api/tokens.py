"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from ostinato.engine.process.async_engine import AsyncEngine
from ostinato.serve.api.generation import check_model
from ostinato.serve.chat.conversation import (
    MAX_MESSAGES,
    ConversationBody,
    checked_tools,
    conversation_of,
    render,
    token_ids_of,
)
from ostinato.serve.chat.messages import Message
from ostinato.serve.chat.model_text import ModelText
from ostinato.serve.http.bodies import Body, ListOf
from ostinato.serve.http.errors import ApiError
from ostinato.serve.http.lifecycle import Lifecycle


class TokenizeRequest(ConversationBody):
    """Text as `/v1/completions` takes it, or a conversation as `/v1/chat/completions` does."""

    model: str | None = None
    """The served model's name, or nothing."""
    prompt: str | None = None
    messages: Annotated[ListOf[Message], Field(max_length=MAX_MESSAGES)] | None = None  # type: ignore[assignment]
    add_special_tokens: bool | None = None
    """Add the tokens that the tokenizer puts around a text (default: true for a prompt, false for a conversation)."""
    return_token_strs: bool = False
    """Also return the text of each token."""

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "give either a prompt or messages", param="prompt")


class DetokenizeRequest(Body):
    model: str | None = None
    """The served model's name, or nothing."""
    tokens: ListOf[int] = Field(max_length=2**20)


def tokens_router(lifecycle: Lifecycle, text_of: Callable[[AsyncEngine], ModelText]) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize", response_model=dict[str, Any])
    async def tokenize(body: TokenizeRequest, _: Request) -> Response:
        """The token ids of a text or of a conversation's prompt, and how many there are."""
        text = text_of(lifecycle.engine)
        check_model(body.model, lifecycle.model_name)
        body.check()
        adds = body.add_special_tokens
        if body.prompt is not None:
            token_ids = await text.encode(body.prompt, adds is not False, "prompt")
        else:
            rendered = await render(text, conversation_of(text, body, checked_tools(text, body.tools, None).told))
            token_ids = await token_ids_of(text, rendered, "messages", adds is True)
        found: dict[str, Any] = {"count": len(token_ids), "max_model_len": text.max_model_len, "tokens": token_ids}
        if body.return_token_strs:
            found["token_strs"] = [text.token_texts.text_of(token_id) for token_id in token_ids]
        return JSONResponse(found)

    @router.post("/detokenize", response_model=dict[str, str])
    async def detokenize(body: DetokenizeRequest, _: Request) -> Response:
        """The text of token ids, special tokens included."""
        text = text_of(lifecycle.engine)
        check_model(body.model, lifecycle.model_name)
        text.check_ids(body.tokens, "tokens")
        return JSONResponse({"prompt": await text.decode(body.tokens, False)})

    return router
