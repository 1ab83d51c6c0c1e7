"""A guide as a grammar, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from ostinato.sample.guide import Guide

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# A slash, or a pair of which the first character escapes the second, or a line break.
_TO_ESCAPE = re.compile(r"\\.|/|\n|\r", re.DOTALL)
_ESCAPES = {"/": r"\/", "\n": r"\n", "\r": r"\r"}
# A space, or a line break and what indents the line: without a bound, a model that likes blanks puts them out for ever.
_WHITESPACE = r"( |\n( {0,32}|\t{0,8}))"
JSON_OPTIONS: JsonCompileOptions = {
    "whitespace_pattern": _WHITESPACE,
    "whitespace_flexible": True,
    "item_separator": ",",
    "key_separator": ":",
    # Nothing of a schema is passed over in silence.
    "lenient": False,
    "coerce_one_of": False,
}
"""All that a schema itself could ask of the library, so that none can."""
_ANY_SPELLING = '%llguidance {"no_forcing": true}'
"""Where the next characters are certain, the library by itself allows only one way to cut them into tokens. A model may
know them by other tokens."""


def lark_grammar(guide: Guide) -> str:
    """The grammar of a guide. It allows every sequence of tokens whose text follows the guide."""
    if guide.lark is not None:
        rules = guide.lark
    elif guide.choice:
        # As one terminal: an automaton, however many there are.
        rules = f"start: CHOICE\nCHOICE: {lark_term(guide)}"
    else:
        rules = f"start: {lark_term(guide)}"
    return f"{rules}\n{_ANY_SPELLING}\n"


def lark_term(guide: Guide) -> str:
    """What stands for a guide within a rule. The guide is of any kind but `lark`."""
    if guide.json_object or guide.json_schema is not None:
        schema = {"type": "object"} if guide.json_schema is None else json.loads(guide.json_schema)
        return f"%json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS}, ensure_ascii=False)}"
    if guide.regex is not None:
        return f"/{escaped(guide.regex)}/"
    return " | ".join(json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(guide.choice))


def escaped(regex: str) -> str:
    """A regular expression as it stands between slashes."""
    return _TO_ESCAPE.sub(lambda found: _ESCAPES.get(found[0], found[0]), regex)
