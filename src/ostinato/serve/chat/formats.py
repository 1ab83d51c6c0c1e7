"""What a model's answers may contain besides plain text."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.serve.chat.calls.forms import CHANNEL, END, HARMONY, MESSAGE, ToolForm
from ostinato.serve.chat.tools import Tool


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The tags around a model's reasoning."""

    begin: str
    end: str


@dataclass(frozen=True, slots=True)
class AnswerFormats:
    """What a model's answers may contain besides plain text. None: the server does not look for it."""

    reasoning: ReasoningTags | None = None
    tools: ToolForm | None = None

    @property
    def has_channels(self) -> bool:
        """Whether an answer is messages in channels, as gpt-oss writes them: then content too stands between tags."""
        return self.tools == HARMONY

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags that can be tokens of their own. If they are special tokens, answers must be decoded with special
        tokens kept, and grammars must know of it."""
        if self.tools is not None and self.has_channels:
            return self.tools.tags
        reasoning = () if self.reasoning is None else (self.reasoning.begin, self.reasoning.end)
        tools = () if self.tools is None else self.tools.tags
        return reasoning + tools


@dataclass(frozen=True)
class AnswerForm:
    """What one answer may consist of."""

    formats: AnswerFormats
    tools: tuple[Tool, ...]
    """The tools that it may call."""
    starts_in_reasoning: bool
    parallel: bool
    """Whether it may have several calls."""
    either: bool
    """Whether it has calls or content, but never both."""

    @property
    def is_plain(self) -> bool:
        """Whether all of it is content, so that nothing has to be looked for."""
        return self.formats.reasoning is None and not self.tools


ANALYSIS = ReasoningTags(f"{CHANNEL}analysis{MESSAGE}", END)
"""Of the form with channels alone."""
THINK = ReasoningTags("<think>", "</think>")
REASONING = (
    THINK,
    ReasoningTags("[THINK]", "[/THINK]"),
    ReasoningTags("<seed:think>", "</seed:think>"),
    ReasoningTags("<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningTags("<|inner_prefix|>", "<|inner_suffix|>"),
)
"""All that are known besides."""


def opens_reasoning(prompt: str, formats: AnswerFormats) -> bool:
    """Whether a rendered prompt ends with an open reasoning tag, so that the answer begins inside reasoning."""
    return formats.reasoning is not None and prompt.rstrip().endswith(formats.reasoning.begin)
