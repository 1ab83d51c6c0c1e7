"""Parts of a model's answers other than plain text."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.serve.chat.calls.forms import CHANNEL, END, HARMONY, MESSAGE, ToolCallFormat
from ostinato.serve.chat.tools import Tool


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The tags around a model's reasoning."""

    begin: str
    end: str


@dataclass(frozen=True, slots=True)
class AnswerFormats:
    """Formats that a model's answers may contain besides plain text. None: the server does not look for it."""

    reasoning: ReasoningTags | None = None
    tools: ToolCallFormat | None = None

    @property
    def has_channels(self) -> bool:
        """True if an answer is messages in channels, as gpt-oss writes them: content is between tags too."""
        return self.tools == HARMONY

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags that can be single tokens.

        If they are special tokens, answers must be decoded with special tokens kept, and grammars need their ids.
        """
        if self.tools is not None and self.has_channels:
            return self.tools.tags
        reasoning = () if self.reasoning is None else (self.reasoning.begin, self.reasoning.end)
        tools = () if self.tools is None else self.tools.tags
        return reasoning + tools


@dataclass(frozen=True)
class AnswerLayout:
    """Parts that one answer may consist of."""

    formats: AnswerFormats
    tools: tuple[Tool, ...]
    """The tools that the answer may call."""
    starts_in_reasoning: bool
    parallel: bool
    """True if the answer may have several calls."""
    either: bool
    """True if the answer has calls or content, but never both."""

    @property
    def is_plain(self) -> bool:
        """True if the whole answer is content, so that nothing has to be looked for."""
        return self.formats.reasoning is None and not self.tools


ANALYSIS = ReasoningTags(f"{CHANNEL}analysis{MESSAGE}", END)
"""Reasoning tags of the form with channels only."""
THINK = ReasoningTags("<think>", "</think>")
REASONING = (
    THINK,
    ReasoningTags("[THINK]", "[/THINK]"),
    ReasoningTags("<seed:think>", "</seed:think>"),
    ReasoningTags("<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningTags("<|inner_prefix|>", "<|inner_suffix|>"),
)
"""All other known reasoning tags."""


def opens_reasoning(prompt: str, formats: AnswerFormats) -> bool:
    """Return whether a rendered prompt ends with an open reasoning tag, so that the answer begins inside reasoning."""
    return formats.reasoning is not None and prompt.rstrip().endswith(formats.reasoning.begin)
