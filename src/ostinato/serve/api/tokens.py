"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter

from ostinato.engine.process.async_engine import AsyncEngine
from ostinato.serve.chat.conversation import checked_tools, conversation_of, render, token_ids_of
from ostinato.serve.chat.model_text import ModelText
from ostinato.serve.http.life import Life
from ostinato.serve.protocol.common import check_model
from ostinato.serve.protocol.tokens import DetokenizeRequest, TokenizeRequest


def tokens_router(life: Life, text_of: Callable[[AsyncEngine], ModelText]) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        """The token ids of a text or of a conversation's prompt, and how many there are."""
        text = text_of(life.engine)
        check_model(body.model, life.model_name)
        body.check()
        adds = body.add_special_tokens
        if body.prompt is not None:
            token_ids = await text.encode(body.prompt, adds is not False, "prompt")
        else:
            tools = checked_tools(text, body.tools, None)
            rendered = await render(text, conversation_of(text, body, tools))
            token_ids = await token_ids_of(text, rendered, "messages", adds is True)
        found: dict[str, Any] = {"count": len(token_ids), "max_model_len": text.max_model_len, "tokens": token_ids}
        if body.return_token_strs:
            found["token_strs"] = [text.token_texts.text_of(token_id) for token_id in token_ids]
        return found

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        """The text of token ids, special tokens included."""
        text = text_of(life.engine)
        check_model(body.model, life.model_name)
        text.check_ids(body.tokens, "tokens")
        return {"prompt": await text.decode(body.tokens, False)}

    return router
