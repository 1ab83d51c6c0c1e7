"""Which reasoning tags and which format of tool calls a model uses, as its chat template shows."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ostinato.serve.chat.tools import Tool


class ToolFormat(StrEnum):
    """How a model writes tool calls. `begin_tag` and `end_tag` stand around a block of them."""

    HERMES = "hermes"
    """Hermes, Qwen, Granite 4: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one call a block."""
    XML = "xml"
    """Qwen3-Coder, Nemotron 3: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`."""
    TOOLCALL = "toolcall"
    """Nemotron-H, Nemotron Nano 2: `<TOOLCALL>[{"name": ..., "arguments": {...}}, ...]</TOOLCALL>`."""

    @property
    def begin_tag(self) -> str:
        return "<TOOLCALL>" if self is ToolFormat.TOOLCALL else "<tool_call>"

    @property
    def end_tag(self) -> str:
        return "</TOOLCALL>" if self is ToolFormat.TOOLCALL else "</tool_call>"


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The tags around a model's reasoning."""

    begin: str
    end: str


@dataclass(frozen=True, slots=True)
class AnswerFormats:
    """What a model's answers may contain besides plain text. None: the server does not look for it."""

    reasoning: ReasoningTags | None = None
    tools: ToolFormat | None = None

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags that can be tokens of their own. If they are special tokens, answers must be decoded with special
        tokens kept, and grammars must know of it."""
        reasoning = () if self.reasoning is None else (self.reasoning.begin, self.reasoning.end)
        tools = () if self.tools is None else (self.tools.begin_tag, self.tools.end_tag)
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


THINK = ReasoningTags("<think>", "</think>")


def detect_formats(chat_template: str | None) -> AnswerFormats:
    """The formats that a Jinja chat template writes earlier answers in, or asks the model for.

    One of the two reasoning tags is enough: some templates only open reasoning, or only cut it out of earlier answers.
    """
    template = chat_template or ""
    reasoning = THINK if THINK.begin in template or THINK.end in template else None
    if ToolFormat.TOOLCALL.begin_tag in template:
        tools = ToolFormat.TOOLCALL
    elif ToolFormat.HERMES.begin_tag in template:
        tools = ToolFormat.XML if "<function=" in template else ToolFormat.HERMES
    else:
        tools = None
    return AnswerFormats(reasoning, tools)


def opens_reasoning(prompt: str, formats: AnswerFormats) -> bool:
    """Whether a rendered prompt ends with an open reasoning tag, so that the answer begins inside reasoning."""
    return formats.reasoning is not None and prompt.rstrip().endswith(formats.reasoning.begin)
