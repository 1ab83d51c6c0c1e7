"""Small languages, each as a guide and as a brute-force answer to: does any text of it begin like this?"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache

from hypothesis import strategies as st

from ostinato.sampling.guide import Guide


@dataclass(frozen=True)
class Language:
    """A set of byte strings. Only `rest` of a subclass knows how it is made up (Brzozowski's derivatives)."""

    def rest(self, byte: int, /) -> Language:
        """What may follow a first byte."""
        raise NotImplementedError

    @property
    def has_empty(self) -> bool:
        raise NotImplementedError

    @property
    def is_empty(self) -> bool:
        """Whether no string is in it."""
        return False

    def after(self, text: bytes) -> Language:
        language = self
        for byte in text:
            language = _rest(language, byte)
        return language

    def begins_with(self, text: bytes) -> bool:
        return not self.after(text).is_empty

    def regex(self) -> str:
        raise NotImplementedError


@cache
def _rest(language: Language, byte: int) -> Language:
    return language.rest(byte)


@dataclass(frozen=True)
class Nothing(Language):
    has_empty = False
    is_empty = True

    def rest(self, _byte: int, /) -> Language:
        return self


@dataclass(frozen=True)
class Text(Language):
    """One string."""

    text: bytes

    @property
    def has_empty(self) -> bool:
        return not self.text

    def rest(self, byte: int, /) -> Language:
        return Text(self.text[1:]) if self.text[:1] == bytes([byte]) else Nothing()

    def regex(self) -> str:
        return re.escape(self.text.decode())


@dataclass(frozen=True)
class Either(Language):
    parts: frozenset[Language]

    @property
    def has_empty(self) -> bool:
        return any(part.has_empty for part in self.parts)

    def rest(self, byte: int, /) -> Language:
        return either(*(_rest(part, byte) for part in self.parts))

    def regex(self) -> str:
        return "(" + "|".join(sorted(part.regex() for part in self.parts)) + ")"


@dataclass(frozen=True)
class Pair(Language):
    first: Language
    second: Language

    @property
    def has_empty(self) -> bool:
        return self.first.has_empty and self.second.has_empty

    def rest(self, byte: int, /) -> Language:
        goes_on = pair(_rest(self.first, byte), self.second)
        return either(goes_on, _rest(self.second, byte)) if self.first.has_empty else goes_on

    def regex(self) -> str:
        return self.first.regex() + self.second.regex()


@dataclass(frozen=True)
class Many(Language):
    """Any number of strings of one language."""

    part: Language
    has_empty = True

    def rest(self, byte: int, /) -> Language:
        return pair(_rest(self.part, byte), self)

    def regex(self) -> str:
        return f"({self.part.regex()})*"


def either(*parts: Language) -> Language:
    flat = {p for part in parts for p in (part.parts if isinstance(part, Either) else [part]) if not p.is_empty}
    return Nothing() if not flat else flat.pop() if len(flat) == 1 else Either(frozenset(flat))


def pair(first: Language, second: Language) -> Language:
    return Nothing() if first.is_empty or second.is_empty else Pair(first, second)


def sequence(*parts: Language) -> Language:
    language: Language = Text(b"")
    for part in reversed(parts):
        language = pair(part, language)
    return language


def at_most(part: Language, times: int) -> Language:
    language: Language = Text(b"")
    for _ in range(times):
        language = either(Text(b""), pair(part, language))
    return language


def _blank() -> Language:
    """What may stand between the parts of a JSON object: a space, or a line break and what indents the line."""
    indent = either(at_most(Text(b" "), 32), at_most(Text(b"\t"), 8))
    return either(Text(b""), Text(b" "), pair(Text(b"\n"), indent))


LETTERS = "ab= 1é"
BYTES = sorted({*LETTERS.encode(), *b'"{}:\n\t'})
_words = st.text(st.sampled_from(LETTERS), min_size=1, max_size=5)
_texts = _words.map(lambda word: Text(word.encode()))
_languages = st.recursive(
    _texts,
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: either(*parts)),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: sequence(*parts)),
        inner.map(Many),
    ),
    max_leaves=5,
)


def _as_json(word: str) -> Language:
    return Text(json.dumps(word, ensure_ascii=False).encode())


def _object(words: list[str]) -> tuple[Guide, Language]:
    schema = {"properties": {"a b": {"enum": words}}, "required": ["a b"], "additionalProperties": False}
    value, blank = either(*map(_as_json, words)), _blank()
    parts = [Text(b"{"), blank, _as_json("a b"), blank, Text(b":"), blank, value, blank, Text(b"}")]
    return Guide(json_schema={"type": "object", **schema}), sequence(*parts)


def _rules(parts: list[Language]) -> tuple[Guide, Language]:
    """One rule after the other, each a terminal."""
    lines = [f"start: {' '.join(f'T{i}' for i in range(len(parts)))}"]
    lines += [f"T{i}: /{part.regex()}/" for i, part in enumerate(parts)]
    return Guide(lark="\n".join(lines)), sequence(*parts)


guides_and_languages = st.one_of(
    _languages.map(lambda language: (Guide(regex=language.regex()), language)),
    st.lists(_words, min_size=1, max_size=4).map(
        lambda words: (Guide(choice=words), either(*(Text(word.encode()) for word in words)))
    ),
    st.lists(_words, min_size=1, max_size=3).map(_object),
    st.lists(_texts, min_size=1, max_size=4).map(_rules),
)
"""A guide and the language of the texts that follow it."""
