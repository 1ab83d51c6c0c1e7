"""Deltas: the reasoning, content and tool calls that one more piece of an answer's text adds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


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

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
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
