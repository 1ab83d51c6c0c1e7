"""Grammars of an answer of a given form that reasoning may stand before, as Lark text for llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from ostinato.sample.grammar import JSON_OPTIONS
from ostinato.sample.guide import Guide
from ostinato.serve.parsing.formats import ReasoningTags

# A slash, or a pair of which the first character escapes the second, or a line break.
_TO_ESCAPE = re.compile(r"\\.|/|\n|\r", re.DOTALL)
_ESCAPES = {"/": r"\/", "\n": r"\n", "\r": r"\r"}


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
        rules = ["thoughts[lazy]: THOUGHTS", f"THOUGHTS: /(?s:.*){_escaped(tags.end)}/"]
    return "\n".join([f"start: {thoughts} value", *rules, r"GAP: /\n{1,2}/", f"value: {value_term(guide)}", ""])


def value_term(guide: Guide) -> str:
    """llguidance's term for what `guide` says: JSON, a regular expression or a choice."""
    if guide.json_object or guide.json_schema is not None:
        schema = {"type": "object"} if guide.json_schema is None else json.loads(guide.json_schema)
        return f"%json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS}, ensure_ascii=False)}"
    if guide.regex is not None:
        return f"/{_escaped(guide.regex)}/"
    return " | ".join(json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(guide.choice))


def _tag(tag: str, special_tags: Collection[str]) -> str:
    return tag if tag in special_tags else json.dumps(tag)


def _escaped(regex: str) -> str:
    """A regular expression as it stands between slashes."""
    return _TO_ESCAPE.sub(lambda found: _ESCAPES.get(found[0], found[0]), regex)
