"""Parts of a model's answers other than plain text, and the deltas that add them.

A delta is the reasoning, content and tool calls that one more piece of an answer's text adds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ostinato.serve.chat.tool_calls.formats import CHANNEL, END, HARMONY, MESSAGE, ToolCallFormat, tokens_of
from ostinato.serve.chat.tools import Tool


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """One piece of a tool call."""

    index: int
    """Number of the call within the answer, from 0."""
    id: str | None
    """Id of the call, with its first piece only."""
    name: str | None
    """Name of the function, with the call's first piece only."""
    arguments: str
    """A further piece of the JSON text of the arguments."""


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """Addition of one piece of text: at most one delta of each call."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    content_spans: tuple[tuple[int, int], ...] = field(default=(), compare=False)
    """Spans (begin, end) of the content's parts in the answer's whole text, in characters."""


class DeltaCollector:
    """Collector of the next AnswerDelta. It numbers the calls and gives them ids."""

    def __init__(self, new_id: Callable[[], str], is_enforced: bool) -> None:
        self._new_id = new_id
        self.is_enforced = is_enforced
        """True if a grammar enforces calls, so that one that begins is one."""
        self.num_calls = 0
        self.after_call = False
        """True if no content followed the last call."""
        self._content = ""
        self._reasoning = ""
        self._spans: list[tuple[int, int]] = []
        self._calls: list[ToolCallDelta] = []

    def add_content(self, text: str, end: int) -> None:
        """Add content that ends at `end`, counted in characters of the answer's whole text."""
        if text:
            self._content += text
            self._spans.append((end - len(text), end))
            self.after_call = False

    def separate_content(self, text: str) -> None:
        """Add text that the answer does not contain, between two parts of the content."""
        self._content += text

    def add_reasoning(self, text: str) -> None:
        self._reasoning += text

    def begin_call(self, name: str) -> None:
        self._calls.append(ToolCallDelta(self.num_calls, self._new_id(), name, ""))
        self.num_calls += 1
        self.after_call = True

    def add_arguments(self, text: str) -> None:
        """Add a further piece of the last call's arguments."""
        if not text:
            return
        last = self.num_calls - 1
        if self._calls:
            call = self._calls[-1]
            self._calls[-1] = ToolCallDelta(last, call.id, call.name, call.arguments + text)
        else:
            self._calls.append(ToolCallDelta(last, None, None, text))

    def take(self) -> AnswerDelta:
        """Return everything gathered since the last time."""
        delta = AnswerDelta(self._content, self._reasoning, tuple(self._calls), tuple(self._spans))
        self._content = self._reasoning = ""
        self._spans.clear()
        self._calls.clear()
        return delta


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
        reasoning = () if self.reasoning is None else tokens_of(self.reasoning.begin, self.reasoning.end)
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
    calls_or_content: bool
    """True if the answer has calls or content, but never both."""
    enforced: bool = False
    """True if a grammar enforces calls: they are passed on as they come."""

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
    ReasoningTags("<|channel>thought", "<channel|>"),
    ReasoningTags("<think:opensource>", "</think:opensource>"),
    ReasoningTags("<mm:think>", "</mm:think>"),
)
"""All other known reasoning tags."""


def opens_reasoning(prompt: str, formats: AnswerFormats) -> bool:
    """Return whether a rendered prompt ends with an open reasoning tag, so that the answer begins inside reasoning."""
    return formats.reasoning is not None and prompt.rstrip().endswith(formats.reasoning.begin)
