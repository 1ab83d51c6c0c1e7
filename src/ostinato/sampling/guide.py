"""Guides: rules for the text of an output (`Guide`), checked when made, and their grammars.

Grammars are in llguidance's dialect of Lark. Imports no torch and no grammar library.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections import deque
from collections.abc import Iterator
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Unpack, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from ostinato.errors import RequestError, short_repr
from ostinato.json_io import DuplicateMemberError, JsonObject, parse_json, unique_members
from ostinato.sampling.json_schema import enforceable
from ostinato.sampling.schema_limits import MAX_JOINED_PATTERNS, MAX_MULTIPLE, MAX_MULTIPLE_DIGITS
from ostinato.setting_names import describe_fields, plain_words

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

    from ostinato.setting_types import GuideSettings

MAX_GUIDE_CHARACTERS = {"json_schema": 65536, "regex": 4096, "choice": 16384, "lark": 131072}
"""Most characters of each kind: time and memory of a grammar grow with them, up to about a second.

A schema counts without its annotations.
"""
MAX_SCHEMA_TEXT = 262_144
"""Most characters of a schema with its annotations."""
_MAX_DEPTH = 100
_OTHER_KINDS = {"json": "json_schema", "schema": "json_schema", "pattern": "regex", "grammar": "lark", "enum": "choice"}
"""Names of kinds of guides elsewhere -> the kinds here."""
_FORMS = {"json_schema": "a dict, its text, or a type such as a pydantic model's class", "choice": "a list of texts"}
_DECODER = json.JSONDecoder(object_pairs_hook=unique_members)
# A comment, a text or a regular expression in a Lark grammar: in these, no character is an operator.
_LARK_TEXT = re.compile(r'//[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/')

# A slash, or an escaped character with its backslash, or a line break.
_TO_ESCAPE = re.compile(r"\\.|/|\n|\r", re.DOTALL)
_ESCAPES = {"/": r"\/", "\n": r"\n", "\r": r"\r"}
# A space, or a line break with an indent. Without a bound, a model that likes blanks would write them for ever.
_WHITESPACE = r"( |\n( {0,32}|\t{0,8}))"
JSON_OPTIONS: JsonCompileOptions = {
    "whitespace_pattern": _WHITESPACE,
    "whitespace_flexible": True,
    "item_separator": ",",
    "key_separator": ":",
    # No part of a schema is ignored silently.
    "lenient": False,
    "coerce_one_of": False,
}
"""All options that a schema itself could set in the library, so that none can."""
_ANY_SPELLING = '%llguidance {"no_forcing": true}'
"""Option that allows any tokens where the next characters are certain.

By default the library allows only one way to cut them into tokens then. A model may know them by other tokens.
"""


@describe_fields
class Guide(BaseModel):
    """Rule for the text of an output: exactly one of the fields is given.

    Every output that its guide ends is of that form. An output that `max_tokens`, `stop` or `stop_token_ids` ends is
    only a prefix of it. Anything illegal is a RequestError.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    json_schema: str | None = None
    """The output is JSON of this schema: an object, its text, or a type such as a pydantic model.

    Properties come in the schema's order.
    """
    json_object: bool = False
    """The output is any JSON object."""
    regex: str | None = None
    """The whole output matches this regular expression (no look-around, no back-references)."""
    choice: tuple[str, ...] = Field(())
    """The output is one of these strings."""
    lark: str | None = None
    """The output follows this grammar, in llguidance's dialect of Lark.

    It is for grammars that a program makes: time and memory are bounded less tightly than those of the others.
    """

    def __init__(self, **settings: Unpack[GuideSettings]) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            given = [name for name, value in settings.items() if value is not None and value is not False]
            raise _request_error(error, list(type(self).model_fields), given) from None

    @field_validator("json_schema", mode="before")
    @classmethod
    def _schema_as_text(cls, value: Any) -> Any:
        try:
            if isinstance(value, type) or get_origin(value) is not None:
                value = TypeAdapter(value).json_schema()
            return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value
        except PydanticUserError as error:
            raise ValueError(f"no schema can be made of {short_repr(value)}: {error.message}") from None
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"the schema is not JSON: {error}") from None

    @field_validator("choice", mode="before")
    @classmethod
    def _choices_to_tuple(cls, value: object) -> object:
        if isinstance(value, list | tuple) and not value:
            raise ValueError("it should have at least one text")
        return tuple(value) if isinstance(value, list) else value

    @field_validator("json_schema")
    @classmethod
    def _schema_within_limits(cls, text: str | None) -> str | None:
        if text is not None:
            if len(text) > MAX_SCHEMA_TEXT:
                raise ValueError(f"it has {len(text)} characters, and may have {MAX_SCHEMA_TEXT}")
            plain = json.dumps(_check_schema(text), ensure_ascii=False)
            _check_length("json_schema", min(len(text), len(plain)))
        return text

    @model_validator(mode="after")
    def _one_that_can_be_met(self) -> Guide:
        given = [name for name in type(self).model_fields if getattr(self, name) not in (None, False, ())]
        if len(given) != 1:
            known = ", ".join(type(self).model_fields)
            raise ValueError(f"a guide is exactly one of {known}; this one has {' and '.join(given) or 'none'}")
        for name in ("regex", "lark"):
            _check_length(name, len(getattr(self, name) or ""))
        _check_cost([schema for schema, _, _ in _schemas_in(self.lark or "")])
        joined = _LARK_TEXT.sub("", self.lark or "").count("&") + 1
        if joined > MAX_JOINED_PATTERNS:
            raise ValueError(f"it joins {joined} terminals with &, and may join {MAX_JOINED_PATTERNS} in all")
        _check_length("choice", sum(map(len, self.choice)) + len(self.choice))
        for text in (self.json_schema, self.regex, self.lark, *self.choice):
            if text is not None and any("\ud800" <= character <= "\udfff" for character in text):
                raise ValueError("it holds half of a surrogate pair, which no text in UTF-8 does")
        return self


def _check_length(name: str, length: int) -> None:
    if length > MAX_GUIDE_CHARACTERS[name]:
        raise ValueError(f"it has {length} characters, and may have {MAX_GUIDE_CHARACTERS[name]}")


def _check_schema(text: str) -> JsonObject:
    """Return the schema of a text in the library's form. ValueError unless it compiles within bounds."""
    try:
        schema = parse_json(text)
    except ValueError as error:
        raise ValueError(f"the schema is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise ValueError("a schema is a JSON object")
    return _check_cost([schema])[0]


def _schemas_in(lark: str) -> Iterator[tuple[object, int, int]]:
    """Yield the JSON values after %json in a Lark grammar, also those in texts, with their places."""
    for place in re.finditer(r"%json\s*", lark):
        try:
            schema, end = _DECODER.raw_decode(lark, place.end())
        except DuplicateMemberError as error:
            raise ValueError(f"a schema after %json: {error}") from None
        except ValueError:
            continue  # it is in a text, or the library will refuse it
        except RecursionError:
            raise ValueError(f"a schema is nested more than {_MAX_DEPTH} deep") from None
        yield schema, place.end(), end


def _enforceable_lark(lark: str) -> str:
    """Return a Lark grammar with its schemas, but for those in texts, in the library's form."""
    texts = deque(text.span() for text in _LARK_TEXT.finditer(lark))
    parts, position = list[str](), 0
    for schema, start, end in _schemas_in(lark):
        while texts and texts[0][1] <= start:
            texts.popleft()
        if start < position or (texts and texts[0][0] < start):
            continue
        options = {key: schema[key] for key in ("x-guidance",) if isinstance(schema, dict) and key in schema}
        parts += [lark[position:start], json.dumps({**enforceable(schema), **options}, ensure_ascii=False)]
        position = end
    return "".join([*parts, lark[position:]])


def _check_cost(schemas: list[object]) -> list[JsonObject]:
    """Return schemas in the library's form. ValueError if they cost too much in parts that it does not bound."""
    patterns, multiples = 0, set[Decimal]()
    for part in _objects(schemas):
        pattern, several, multiple = part.get("pattern"), part.get("patternProperties"), part.get("multipleOf")
        patterns += len(pattern) if isinstance(pattern, str) else 0
        patterns += sum(map(len, several)) if isinstance(several, dict) else 0
        if isinstance(multiple, int | float) and not isinstance(multiple, bool) and 0 < multiple < math.inf:
            multiples.add(Decimal(str(multiple)))
    if patterns > MAX_GUIDE_CHARACTERS["regex"]:
        most = MAX_GUIDE_CHARACTERS["regex"]
        raise ValueError(f"the patterns of the schema have {patterns} characters, and may have {most} together")
    made = [enforceable(schema) for schema in schemas]
    if multiples and _common_multiple(multiples) > MAX_MULTIPLE:
        raise ValueError(
            f"the values of multipleOf have a common multiple of more than {MAX_MULTIPLE} of their last digits' units"
        )
    return made


def _objects(schemas: list[object]) -> Iterator[JsonObject]:
    """Yield every object in the schemas."""
    level = schemas
    for _ in range(_MAX_DEPTH):
        yield from (value for value in level if isinstance(value, dict))
        level = [
            inner
            for value in level
            if isinstance(value, dict | list)
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return
    raise ValueError(f"the schema is nested more than {_MAX_DEPTH} deep")


def _common_multiple(values: set[Decimal]) -> int:
    """Return the least common multiple of decimal numbers, in units of the last digit that any of them has."""
    exponents = [int(value.normalize().as_tuple().exponent) for value in values]
    last = min(0, *exponents)
    if last < -MAX_MULTIPLE_DIGITS or max(values) > MAX_MULTIPLE:
        return MAX_MULTIPLE + 1
    return math.lcm(*(int(value.scaleb(-last)) for value in values))


def _request_error(error: ValidationError, known: list[str], given: list[str]) -> RequestError:
    """Return one error for everything that is wrong with a guide whose `given` fields ask for something."""
    parts: list[tuple[str, str]] = []
    for name, problem in _problems(error, known, given):
        separator = "; " if parts else ""
        if not name:
            parts.append(("", separator + problem))
            continue
        if separator:
            parts.append(("", separator))
        parts.append((name, f": {problem}"))
    return RequestError.of_parts(parts, setting="guide")


def _problems(error: ValidationError, known: list[str], given: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each problem of a guide with the name of its field, which is empty if the problem names it."""
    for detail in error.errors():
        setting = str(detail["loc"][0]) if detail["loc"] else given[0] if len(given) == 1 else ""
        if detail["type"] == "extra_forbidden":
            close = difflib.get_close_matches(setting, known, n=1, cutoff=0.4)
            meant = _OTHER_KINDS.get(setting) or next(iter(close), None)
            hint = f" (here it is {meant})" if meant else ""
            yield "", f"unknown guide {setting}{hint}; known are {', '.join(known)}"
        elif detail["type"] in ("string_type", "tuple_type") and len(detail["loc"]) == 1:
            yield f"guide.{setting}", f"it should be {_FORMS.get(setting, 'a text')}, not {short_repr(detail['input'])}"
        else:
            yield f"guide{'.' if setting else ''}{setting}", plain_words(detail)


def lark_grammar(guide: Guide) -> str:
    """Return the grammar of a guide. It allows every sequence of tokens whose text follows the guide."""
    if guide.lark is not None:
        rules = _enforceable_lark(guide.lark)
    elif guide.choice:
        # One terminal for all makes one automaton, however many there are.
        rules = f"start: CHOICE\nCHOICE: {lark_term(guide)}"
    else:
        rules = f"start: {lark_term(guide)}"
    return f"{rules}\n{_ANY_SPELLING}\n"


def lark_term(guide: Guide) -> str:
    """Return the term for a guide within a rule. The guide is of any kind but `lark`."""
    if guide.json_object or guide.json_schema is not None:
        schema = {"type": "object"} if guide.json_schema is None else enforceable(json.loads(guide.json_schema))
        return f"%json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS}, ensure_ascii=False)}"
    if guide.regex is not None:
        return f"/{escaped(guide.regex)}/"
    return " | ".join(json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(guide.choice))


def escaped(regex: str) -> str:
    """Return a regular expression escaped for use between slashes."""
    return _TO_ESCAPE.sub(lambda found: _ESCAPES.get(found[0], found[0]), regex)
