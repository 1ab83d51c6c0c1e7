"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

import json

from fastapi import Request
from fastapi.responses import Response
from pydantic import Field

from ostinato.json_io import JsonObject
from ostinato.serve.api.generation_fields import check_model
from ostinato.serve.body_workers.context import RequestContext
from ostinato.serve.chat.conversation import (
    ConversationBody,
    Message,
    check_counts,
    checked_tools,
    conversation_of,
    render,
    token_ids_of,
)
from ostinato.serve.http.api_errors import ApiError
from ostinato.serve.http.json_bodies import Body, ListOf
from ostinato.serve.http.middleware import ApiRouter

_MAX_LOOP_STRINGS = 256
"""Tokens whose texts are looked up on the event loop: each takes up to 20 microseconds the first time."""


class TokenizeRequest(ConversationBody):
    """Text as `/v1/completions` takes it, or a conversation as `/v1/chat/completions` does."""

    model: str | None = None
    """The served model's name, or nothing."""
    prompt: str | None = None
    messages: ListOf[Message] | None = None  # type: ignore[assignment]
    add_special_tokens: bool | None = None
    """Add the tokens that the tokenizer puts around a text (default: true for a prompt, false for a conversation)."""
    return_token_strs: bool | None = None
    """True to return the text of each token too."""

    def prepare(self, context: RequestContext) -> bytes:
        """Return the answer's JSON."""
        check_model(self.model, context.model_name, context.settings)
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "give either a prompt or messages", param="prompt")
        text, adds = context.text, self.add_special_tokens
        if self.return_token_strs and len(self.prompt or "") > _MAX_LOOP_STRINGS:
            context.require_worker()  # before the text is encoded in vain
        if self.prompt is not None:
            token_ids = context.encode(self.prompt, adds is not False, "prompt")
        else:
            check_counts(self.messages or (), self.tools, context.settings)
            rendered = render(context, conversation_of(text, self, checked_tools(text, self.tools, None).offered_tools))
            token_ids = token_ids_of(context, rendered, "messages", adds is True)
        if self.return_token_strs and len(token_ids) > _MAX_LOOP_STRINGS:
            context.require_worker()
        texts = [text.token_texts.text_of(token_id) for token_id in token_ids] if self.return_token_strs else None
        found = {"count": len(token_ids), "max_model_len": text.max_model_len, "tokens": token_ids}
        return _json({**found, "token_strs": texts})


class DetokenizeRequest(Body):
    model: str | None = None
    """The served model's name, or nothing."""
    tokens: ListOf[int] = Field(max_length=2**20)

    def prepare(self, context: RequestContext) -> bytes:
        """Return the answer's JSON."""
        check_model(self.model, context.model_name, context.settings)
        context.text.check_ids(self.tokens, "tokens")
        return _json({"prompt": context.text.tokenizer.decode(self.tokens, False)})


def _json(found: JsonObject) -> bytes:
    return json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode("utf-8")


def tokens_router() -> ApiRouter:
    router = ApiRouter()

    @router.post("/tokenize", response_model=JsonObject)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:  # noqa: ARG001 (for its description)
        """Return the token ids of a text or of a conversation's prompt, and their number."""
        return Response(request.state.prepared, media_type="application/json")

    @router.post("/detokenize", response_model=dict[str, str])
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:  # noqa: ARG001
        """Return the text of token ids, special tokens included."""
        return Response(request.state.prepared, media_type="application/json")

    return router
