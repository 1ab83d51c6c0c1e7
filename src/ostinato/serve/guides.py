"""The guide of an answer: of the form that a request wants, or of the tool calls that it demands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ostinato.errors import RequestError
from ostinato.sample.guide import Guide
from ostinato.serve.errors import ApiError
from ostinato.serve.model_text import ModelText
from ostinato.serve.parsing.guide import tool_guide
from ostinato.serve.parsing.value_guide import value_guide
from ostinato.serve.protocol.guides import Wish

if TYPE_CHECKING:
    from ostinato.serve.conversation import AnswerForm


async def plain_guide(text: ModelText, wish: Wish | None) -> Guide | None:
    """Of an output that is nothing but what is wished for."""
    if wish is None:
        return None
    return await text.compiling.checked(_guide(wish.param, **{wish.kind: wish.value}), wish.param)


async def answer_guide(text: ModelText, form: AnswerForm, wish: Wish | None, tool_choice: Any) -> Guide | None:
    """Of an answer of a model that may reason first, and calls tools as it is told to."""
    if form.tools and wish is not None:
        message = f"{wish.param} and tools are not served together; leave one out, or set tool_choice to none"
        raise ApiError(400, message, param=wish.param)
    if wish is None:
        return await _tool_guide(text, form, tool_choice)
    tags = form.formats.reasoning
    if tags is None:
        return await plain_guide(text, wish)
    checked = _guide(wish.param, **{wish.kind: wish.value})
    lark = value_guide(checked, tags, form.starts_in_reasoning, text.special_tags)
    return await text.compiling.checked(_guide(wish.param, lark=lark), wish.param)


async def _tool_guide(text: ModelText, form: AnswerForm, tool_choice: Any) -> Guide | None:
    try:
        lark = tool_guide(
            form.tools,
            tool_choice,
            form.formats,
            starts_in_reasoning=form.starts_in_reasoning,
            parallel=form.parallel,
            special_tags=text.special_tags,
        )
    except RequestError as error:
        raise ApiError(400, error.message, param="tools") from None
    return None if lark is None else await text.compiling.checked(_guide("tools", lark=lark), "tools")


def _guide(param: str, **kind: Any) -> Guide:
    try:
        return Guide(**kind)
    except RequestError as error:
        raise ApiError(400, error.message, param=param) from None
