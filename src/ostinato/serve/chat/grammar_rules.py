"""Rules of a grammar of answers, in llguidance's dialect of Lark, while they are written."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from ostinato.sample.guide import Guide, lark_term
from ostinato.serve.chat.calls.forms import CHANNEL, MESSAGE, START
from ostinato.serve.chat.formats import ANALYSIS, ReasoningTags


class LarkGrammar:
    """The rules of one grammar while they are written."""

    def __init__(self, special_tags: Mapping[str, int]) -> None:
        self.special_tags = special_tags
        self.rules: list[str] = []

    def text(self, start: str) -> str:
        """Return the whole grammar."""
        return "\n".join([f"start: {start}", *self.rules, ""])

    def thoughts(self, tags: ReasoningTags | None, inside: bool) -> str:
        """Return terms for reasoning before anything else: required if the answer begins `positions_inside` it, else optional."""
        if tags is None:
            return ""
        if tags == ANALYSIS:
            self.up_to("thoughts", tags.end, "/(?s:.*)/")
            return f"({self.tags(tags.begin)} thoughts {self.tags(START + 'assistant')})? "
        self.up_to("thoughts", tags.end, "/(?s:.*)/")
        self.rules.append(r"GAP: /\n{1,2}/")
        return "thoughts GAP? " if inside else f"({self.tag(tags.begin)} thoughts GAP?)? "

    def value(self, guide: Guide, in_channel: bool = False) -> str:
        """Return a term for a value of `guide`; `in_channel`: as the message of the channel `final`."""
        self.rules.append(f"value: {lark_term(guide)}")
        return f"{self.final()} value" if in_channel else "value"

    def final(self) -> str:
        """Return a term for the header of a message to the user."""
        return self.tags(f"{CHANNEL}final{MESSAGE}")

    def up_to(self, rule: str, tag: str, text: str) -> None:
        """Add a rule for `text`, a terminal, up to and with the first `tag`."""
        name = rule.upper()
        if tag in self.special_tags:
            self.rules += [f"{rule}: {name} {self.tag(tag)}", f"{name}: {text}"]
        else:
            self.rules += [f"{rule}[lazy]: {name}", f"{name}: ({text}) & /(?s:.*){regex(tag)}/"]

    def tags(self, text: str) -> str:
        """Return a text with tags in it, as terms."""
        return " ".join(self.tag(part) for part in re.split(r"(<\|\w+\|>)", text) if part)

    def tag(self, tag: str) -> str:
        return f"<[{self.special_tags[tag]}]>" if tag in self.special_tags else json.dumps(tag)


def regex(tag: str) -> str:
    """Return a regular expression for a tag, to be put between slashes."""
    return re.escape(tag).replace("/", r"\/")
