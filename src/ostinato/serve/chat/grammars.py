"""Grammars of answers, as Lark text for llguidance: tool calls in a model's own format, and values after reasoning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ostinato.errors import Remedy, RequestError
from ostinato.sample.guide import Guide
from ostinato.serve.chat.calls.forms import known_forms
from ostinato.serve.chat.calls.grammar import ToolGrammar
from ostinato.serve.chat.formats import ANALYSIS, AnswerFormats, ReasoningTags
from ostinato.serve.chat.grammar_rules import LarkGrammar
from ostinato.serve.chat.tools import Tool, forced_tools

NO_TAGS: Mapping[str, int] = {}


def tool_guide(
    tools: Sequence[Tool],
    tool_choice: Any,
    formats: AnswerFormats,
    *,
    starts_in_reasoning: bool = False,
    parallel: bool = True,
    special_tags: Mapping[str, int] = NO_TAGS,
    instead: Guide | None = None,
) -> str | None:
    """Return the Lark grammar of an answer that calls tools as `tool_choice` demands; None if it demands nothing.

    - "required" allows calls of any of the tools, several in a row if `parallel`. A named function is called once.
    - With "auto", if some tools are `strict`, every call in the answer must be well-formed.
    - With "auto" and `instead`, the answer either consists of calls, as with "required", or has that form.

    A model that reasons may do so first; it must end its reasoning if the prompt began it. `special_tags` are the tags
    of the form that are special tokens of the tokenizer, with their ids: a grammar does not write these as text.

    Arguments follow their schemas, with properties in the schema's order. In the XML format only parameters that the
    schema names are written, and a string without `enum` or `const` is any text without `</parameter>`. RequestError if
    the choice is malformed, the model has no known format, or the format cannot write a name.
    """
    called = forced_tools(tools, tool_choice)
    may_call = bool(tools) and not called and tool_choice != "none"
    either = may_call and instead is not None
    free = may_call and not either and any(tool.strict for tool in tools)
    if not (called or either or free):
        return None
    if formats.tools is None:
        demand = "tool_choice" if called else "a form of the answer beside tools" if either else "strict"
        remedy = Remedy("tool_choice", "auto" if called else "none") if called or either else Remedy("strict", False)
        raise RequestError(
            f"{demand} needs a model whose chat template shows how it writes tool calls; known are the forms of "
            f"{known_forms()}",
            [remedy],
        )
    grammar = ToolGrammar(formats.tools, special_tags, called or tools)
    thoughts = grammar.thoughts(formats.reasoning, starts_in_reasoning)
    if instead is not None and either:
        return grammar.text(thoughts + grammar.calls_or_value(instead, parallel))
    if free:
        return grammar.text(thoughts + grammar.free_calls(formats.reasoning, parallel))
    return grammar.text(thoughts + grammar.forced_calls(parallel and tool_choice == "required"))


def value_guide(
    guide: Guide, tags: ReasoningTags, starts_in_reasoning: bool, special_tags: Mapping[str, int] = NO_TAGS
) -> str:
    """Return the Lark grammar of a value of `guide` (JSON, a regular expression or a choice), after reasoning.

    Reasoning must end if the prompt began it; otherwise it is optional. `special_tags` as for `tool_guide`.
    """
    grammar = LarkGrammar(special_tags)
    return grammar.text(grammar.thoughts(tags, starts_in_reasoning) + grammar.value(guide, in_channel=tags == ANALYSIS))
