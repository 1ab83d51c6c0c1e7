"""The guide of an answer: the form that a request asks for, or the tool calls that it demands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ostinato.errors import RequestError
from ostinato.sample.guide import Guide
from ostinato.serve.chat.formats import AnswerForm
from ostinato.serve.chat.grammars import tool_guide, value_guide
from ostinato.serve.chat.model_text import ModelText
from ostinato.serve.chat.tools import forced_tools
from ostinato.serve.http.errors import ApiError


@dataclass(frozen=True)
class GuideRequest:
    """A form that an output should have."""

    param: str
    """The field of the body that asks for it."""
    kind: str
    """A field of Guide."""
    value: Any

    def guide(self) -> Guide:
        """ApiError for a value that is no such form."""
        return _guide(self.param, **{self.kind: self.value})


async def plain_guide(text: ModelText, asked: GuideRequest | None) -> Guide | None:
    """The compiled guide of an output that has the form and nothing else."""
    return None if asked is None else await text.background.compiled(asked.guide(), asked.param)


async def answer_guide(text: ModelText, form: AnswerForm, asked: GuideRequest | None, tool_choice: Any) -> Guide | None:
    """The compiled guide of an answer that may reason first, and calls tools as `tool_choice` says.

    Where a form is asked for and no call is demanded, the answer either calls tools or has the form.
    """
    if asked is None or forced_tools(form.tools, tool_choice):
        return await _tool_guide(text, form, tool_choice)
    guide = asked.guide()
    if form.tools:
        try:
            return await _tool_guide(text, form, tool_choice, guide)
        except ApiError as error:
            if error.status == 400:
                await text.background.compiled(guide, asked.param)  # raises if the form alone is what is wrong
            raise
    tags = form.formats.reasoning
    if tags is None:
        return await text.background.compiled(guide, asked.param)
    lark = value_guide(guide, tags, form.starts_in_reasoning, text.special_tags)
    return await text.background.compiled(_guide(asked.param, lark=lark), asked.param)


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
    return None if lark is None else await text.background.compiled(_guide("tools", lark=lark), "tools")


def _guide(param: str, **kind: Any) -> Guide:
    try:
        return Guide(**kind)
    except RequestError as error:
        raise ApiError(400, error.message, param=param) from None
