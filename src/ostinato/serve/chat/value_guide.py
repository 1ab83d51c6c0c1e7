"""Grammars of an answer of a given form that reasoning may stand before, as Lark text for llguidance."""

from __future__ import annotations

import json
from collections.abc import Collection

from ostinato.sample.guide import Guide
from ostinato.sample.lark import escaped, lark_term
from ostinato.serve.chat.formats import ReasoningTags


def value_guide(
    guide: Guide, tags: ReasoningTags, starts_in_reasoning: bool, special_tags: Collection[str] = ()
) -> str:
    """The Lark grammar of what `guide` says (JSON, a regular expression or a choice), behind reasoning.

    Reasoning must end if the prompt began it, and may stand there otherwise. `special_tags` are those of the tags that
    are special tokens of the tokenizer: a grammar names these apart from text.
    """
    thoughts = "thoughts GAP?" if starts_in_reasoning else f"({_tag(tags.begin, special_tags)} thoughts GAP?)?"
    if tags.end in special_tags:
        rules = [f"thoughts: THOUGHTS {tags.end}", "THOUGHTS: /(?s:.*)/"]
    else:
        rules = ["thoughts[lazy]: THOUGHTS", f"THOUGHTS: /(?s:.*){escaped(tags.end)}/"]
    return "\n".join([f"start: {thoughts} value", *rules, r"GAP: /\n{1,2}/", f"value: {lark_term(guide)}", ""])


def _tag(tag: str, special_tags: Collection[str]) -> str:
    return tag if tag in special_tags else json.dumps(tag)
