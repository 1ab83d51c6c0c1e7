"""The guide of an answer: of the form that a request wants, or of the tool calls that it demands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ostinato.errors import RequestError
from ostinato.sample.guide import Guide
from ostinato.serve.chat.model_text import ModelText
from ostinato.serve.http.errors import ApiError
from ostinato.serve.parsing.guide import tool_guide
from ostinato.serve.parsing.tools import forced_tools
from ostinato.serve.parsing.value_guide import value_guide
from ostinato.serve.protocol.guides import Wish

if TYPE_CHECKING:
    from ostinato.serve.chat.conversation import AnswerForm


async def plain_guide(text: ModelText, wish: Wish | None) -> Guide | None:
    """Of an output that is nothing but what is wished for."""
    if wish is None:
        return None
    return await text.compiling.checked(_guide(wish.param, **{wish.kind: wish.value}), wish.param)


async def answer_guide(text: ModelText, form: AnswerForm, wish: Wish | None, tool_choice: Any) -> Guide | None:
    """Of an answer of a model that may reason first, and calls tools as it is told to: where it need not, the answer
    either calls tools or is as wished for."""
    if wish is None or forced_tools(form.tools, tool_choice):
        return await _tool_guide(text, form, tool_choice)
    checked = _guide(wish.param, **{wish.kind: wish.value})
    if form.tools:
        try:
            return await _tool_guide(text, form, tool_choice, checked)
        except ApiError as error:
            if error.status == 400:
                await text.compiling.checked(checked, wish.param)  # whose error it is, if it has one by itself
            raise
    tags = form.formats.reasoning
    if tags is None:
        return await text.compiling.checked(checked, wish.param)
    lark = value_guide(checked, tags, form.starts_in_reasoning, text.special_tags)
    return await text.compiling.checked(_guide(wish.param, lark=lark), wish.param)


async def _tool_guide(
    text: ModelText, form: AnswerForm, tool_choice: Any, instead: Guide | None = None
) -> Guide | None:
    try:
        lark = tool_guide(
            form.tools,
            tool_choice,
            form.formats,
            starts_in_reasoning=form.starts_in_reasoning,
            parallel=form.parallel,
            special_tags=text.special_tags,
            instead=instead,
        )
    except RequestError as error:
        raise ApiError(400, error.message, param="tools") from None
    return None if lark is None else await text.compiling.checked(_guide("tools", lark=lark), "tools")


def _guide(param: str, **kind: Any) -> Guide:
    try:
        return Guide(**kind)
    except RequestError as error:
        raise ApiError(400, error.message, param=param) from None
