"""The forms in which models write tool calls, as data. Readers and grammars of calls both use them.

A model's chat template shows its form (`serve/chat/answer_parser.py`). A form of another model that is composed like
one of these is one more entry of `FORMS`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ostinato.serve.chat.tools import Tool


class VariablePart(Enum):
    """Part of a call whose text differs between calls. Readers skip ids and numbers of calls."""

    NAME = "[a-zA-Z0-9_-]{1,64}"
    ID = "[a-zA-Z0-9]{9}"
    INDEX = "[0-9]{1,3}"
    ARGUMENTS = "a JSON object"


NAME, ID, INDEX, ARGUMENTS = VariablePart

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
"""Marks of harmony's messages."""


@dataclass(frozen=True, slots=True)
class JsonSyntax:
    """`{"name": NAME, "arguments": {...}}`, by these keys. Without `name` the name itself is the key."""

    name: str | None = "name"
    arguments: str = "arguments"


@dataclass(frozen=True, slots=True)
class NamedSyntax:
    """A name, JSON arguments after it, and texts around them; white space, which readers skip, is apart."""

    parts: tuple[str | VariablePart, ...]


@dataclass(frozen=True, slots=True)
class TagSyntax:
    """Syntax with tags around each argument.

    A call is `function` NAME `name_end`, then for each argument `key` KEY `key_end` VALUE `value_end`, then
    `function_end`. Strings are written verbatim, other values as JSON. With `on_lines` each tag and value is on a
    separate line, and one newline on either side of a value belongs to the form; else newlines between tags do not
    matter. `kinds` are words for a string and for any other value; the value's stands after the first of `key_end`.
    `after` is white space that templates print after `name_end` and values; readers skip it.
    """

    function: str
    name_end: str
    key: str
    key_end: tuple[str, ...]
    value_end: str
    function_end: str
    on_lines: bool = False
    kinds: tuple[str, ...] = ()
    after: str = ""


@dataclass(frozen=True, slots=True)
class BareKeySyntax:
    """`call:NAME{KEY:VALUE,...}`, where strings stand between two `quote`s and keys of objects have no quotes."""

    quote: str


@dataclass(frozen=True, slots=True)
class PythonSyntax:
    """`NAME(KEY=VALUE, ...)`; grammars write values as JSON, readers take Python's literals, too."""


@dataclass(frozen=True, slots=True)
class ChannelSyntax:
    """A message to `functions.NAME` whose text is JSON arguments; the answer is all messages (`chat/harmony.py`)."""


@dataclass(frozen=True, slots=True)
class EquationSyntax:
    """The left side of an equation, `17 + 25 = `, which ends the answer.

    It calls the one tool that there is, whose only required parameter is a text of this name.
    """

    parameter: str


Syntax = JsonSyntax | NamedSyntax | TagSyntax | BareKeySyntax | PythonSyntax | ChannelSyntax | EquationSyntax

_TOKEN = re.compile(r"<\|[^<>|\s]+\|?>|<[^<>|\s]+\|>|｜DSML｜")
"""The part of a tag that is a token where the whole is none, as vocabularies write such tokens."""


def tokens_of(*texts: str) -> tuple[str, ...]:
    """Return texts that may be special tokens: the tags themselves, and marks within them."""
    return tuple(dict.fromkeys(token for text in texts if text.strip() for token in (text, *_TOKEN.findall(text))))


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """Form of a model's tool calls: blocks of one call, or of several if there is a `separator`."""

    name: str
    begin: str
    """Tag that begins a block. Empty: the answer's first character begins a call, and there are no others."""
    end: str
    """Tag that ends a block; empty if the block ends with its last call."""
    syntax: Syntax
    separator: str | None = None
    """Text between two calls of a block; readers skip any white space there. None: a block has one call."""
    open: str = ""
    """Text before the first call of a block, for forms whose blocks may have several calls."""
    close: str = ""
    gap: str = ""
    """White space after the begin tag and before the end tag, as templates print it. A reader skips any there."""
    block_gap: str | None = "\n"
    """Text between two blocks. None: an answer has one block."""
    hints: tuple[str, ...] = ()
    """Texts that identify the form in a template that prints no calls; if there are none, its tags do."""

    @property
    def parser(self) -> str:
        """Name of the form as a value of `tool_call_parser`."""
        return self.name.partition(",")[0].lower().replace(" ", "-")

    def can_call(self, tools: Sequence[Tool]) -> bool:
        """Return whether the form can write calls of all these tools."""
        if not isinstance(self.syntax, EquationSyntax):
            return True
        name = self.syntax.parameter
        return len(tools) == 1 and all(
            tool.parameters.get("required") == [name]
            and tool.parameters.get("properties", {}).get(name, {}).get("type") == "string"
            for tool in tools
        )

    @property
    def tags(self) -> tuple[str, ...]:
        """The form's tags, and the marks within them: all texts that may be special tokens of a tokenizer."""
        syntax, inner = self.syntax, tuple[str, ...]()
        if isinstance(syntax, NamedSyntax):
            inner = tuple(part for part in syntax.parts if isinstance(part, str))
        elif isinstance(syntax, TagSyntax):
            inner = (syntax.key, *syntax.key_end, syntax.value_end)
        elif isinstance(syntax, BareKeySyntax):
            inner = (syntax.quote,)
        elif isinstance(syntax, ChannelSyntax):
            inner = (CHANNEL, "<|constrain|>", MESSAGE, END, "<|return|>")
        return tokens_of(self.begin, *inner, self.end)


HERMES = ToolCallFormat("Hermes, Qwen, Granite 4", "<tool_call>", "</tool_call>", JsonSyntax(), gap="\n")
XML = ToolCallFormat(
    "Qwen3-Coder, Qwen3.5, Nemotron 3",
    "<tool_call>",
    "</tool_call>",
    TagSyntax("<function=", ">", "<parameter=", (">",), "</parameter>", "</function>", on_lines=True),
    gap="\n",
)
TOOLCALL = ToolCallFormat(
    "Nemotron-H, Nemotron Nano 2",
    "<TOOLCALL>",
    "</TOOLCALL>",
    JsonSyntax(),
    separator=",",
    open="[",
    close="]",
    block_gap="",
)
GLM = ToolCallFormat(
    "GLM, Laguna",
    "<tool_call>",
    "</tool_call>",
    TagSyntax("", "", "<arg_key>", ("</arg_key>", "<arg_value>"), "</arg_value>", ""),
)
LFM2 = ToolCallFormat(
    "LFM2",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    PythonSyntax(),
    separator=",",
    open="[",
    close="]",
    block_gap="",
    hints=("<|tool_list_start|>",),
)
OLMO3 = ToolCallFormat(
    "OLMo 3", "<function_calls>", "</function_calls>", PythonSyntax(), separator="\n", block_gap=None
)
LLAMA3 = ToolCallFormat("Llama 3", "", "", JsonSyntax(arguments="parameters"), block_gap=None)
MISTRAL = ToolCallFormat(
    "Mistral Small 3.1, later ones", "[TOOL_CALLS]", "", NamedSyntax((NAME, "[ARGS]", ARGUMENTS)), block_gap=""
)
MISTRAL_WITH_IDS = ToolCallFormat(
    "Mistral Small 3.2", "[TOOL_CALLS]", "", NamedSyntax((NAME, "[CALL_ID]", ID, "[ARGS]", ARGUMENTS)), block_gap=""
)
MISTRAL_LIST = ToolCallFormat("Mistral Nemo", "[TOOL_CALLS]", "", JsonSyntax(), separator=",", open="[", close="]")
KIMI = ToolCallFormat(
    "Kimi K2",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    NamedSyntax(
        (
            "<|tool_call_begin|>",
            "functions.",
            NAME,
            ":",
            INDEX,
            "<|tool_call_argument_begin|>",
            ARGUMENTS,
            "<|tool_call_end|>",
        )
    ),
    separator="",
    block_gap="",
)
MINIMAX = ToolCallFormat(
    "MiniMax M2",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    TagSyntax('<invoke name="', '">', '<parameter name="', ('">',), "</parameter>", "</invoke>"),
    separator="",
    gap="\n",
)
MINIMAX_LINES = ToolCallFormat("MiniMax M1", "<tool_calls>", "</tool_calls>", JsonSyntax(), separator="", gap="\n")
APRIEL = ToolCallFormat(
    "Apriel", "<tool_calls>", "</tool_calls>", JsonSyntax(), separator=",", open="[", close="]", block_gap=""
)
SEED = ToolCallFormat(
    "Seed-OSS",
    "<seed:tool_call>",
    "</seed:tool_call>",
    TagSyntax("<function=", ">", "<parameter=", (">",), "</parameter>", "</function>"),
    gap="\n",
)
MINICPM = ToolCallFormat(
    "MiniCPM5", '<function name="', "</function>", TagSyntax("", '">', '<param name="', ('">',), "</param>", "")
)
COMMAND = ToolCallFormat(
    "Command R7B, Command A",
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    JsonSyntax("tool_name", "parameters"),
    separator=",",
    open="[",
    close="]",
    block_gap="",
)
APERTUS = ToolCallFormat(
    "Apertus", "<|tools_prefix|>", "<|tools_suffix|>", JsonSyntax(None), separator=",", open="[", close="]"
)
COMMAND_R = ToolCallFormat(
    "Command R+", "Action:\n```json\n", "```", JsonSyntax("tool_name", "parameters"), separator=",", open="[", close="]"
)
GRANITE = ToolCallFormat("Granite 3.3", "<|tool_call|>", "", JsonSyntax(), separator=",", open="[", close="]")
FIREFUNCTION = ToolCallFormat(
    "Firefunction", "functools", "", JsonSyntax(), separator=",", open="[", close="]", hints=("functools[{",)
)
GIGACHAT = ToolCallFormat("GigaChat 3.1", "<|function_call|>", "", JsonSyntax())
GIGACHAT3 = ToolCallFormat(
    "GigaChat 3", "<|message_sep|>\n\nfunction call<|role_sep|>\n", "<|message_sep|>", JsonSyntax(), block_gap=None
)
GEMMA = ToolCallFormat("Gemma 4", "<|tool_call>", "<tool_call|>", BareKeySyntax('<|"|>'), block_gap="")
DEEPSEEK = ToolCallFormat(
    "DeepSeek V3.1",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    NamedSyntax(("<｜tool▁call▁begin｜>", NAME, "<｜tool▁sep｜>", ARGUMENTS, "<｜tool▁call▁end｜>")),
    separator="",
    block_gap="",
)
DEEPSEEK_R1 = ToolCallFormat(
    "DeepSeek V3, R1",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    NamedSyntax(
        (
            "<｜tool▁call▁begin｜>",
            "function",
            "<｜tool▁sep｜>",
            NAME,
            "\n",
            "```json",
            "\n",
            ARGUMENTS,
            "\n",
            "```",
            "<｜tool▁call▁end｜>",
        )
    ),
    separator="",
    block_gap="",
)
_DSML = TagSyntax(
    '<｜DSML｜invoke name="',
    '">',
    '<｜DSML｜parameter name="',
    ('" string="', '">'),
    "</｜DSML｜parameter>",
    "</｜DSML｜invoke>",
    kinds=("true", "false"),
    after="\n",
)
DEEPSEEK_V32 = ToolCallFormat(
    "DeepSeek V3.2", "<｜DSML｜function_calls>", "</｜DSML｜function_calls>", _DSML, separator="", gap="\n"
)
DEEPSEEK_V4 = ToolCallFormat(
    "DeepSeek V4", "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", _DSML, separator="", gap="\n"
)
HUNYUAN = ToolCallFormat(
    "Hy3",
    "<tool_calls:opensource>",
    "</tool_calls:opensource>",
    TagSyntax(
        "<tool_call:opensource>",
        "<tool_sep:opensource>",
        "<arg_key:opensource>",
        ("</arg_key:opensource>", "\n", "<arg_value:opensource>"),
        "</arg_value:opensource>",
        "</tool_call:opensource>",
        after="\n",
    ),
    separator="",
    gap="\n",
)
FUNCTIONARY = ToolCallFormat(
    "Functionary 3.1", "<function=", "</function>", NamedSyntax((NAME, ">", ARGUMENTS)), block_gap=""
)
EQUATION = ToolCallFormat(
    "demo", "", "", EquationSyntax("expression"), block_gap=None, hints=("function.arguments.expression",)
)
"""The form of the embedded model, which has learnt no other: its chat template alone identifies it."""
GENERIC = ToolCallFormat("generic", "<tool_call>", "</tool_call>", JsonSyntax(), gap="\n")
"""The form for a model that has learnt none.

The server itself describes tools and writes earlier calls and their results in it (`generic_messages`), and a grammar
enforces every call.
"""
HARMONY = ToolCallFormat("gpt-oss", START, "<|call|>", ChannelSyntax(), block_gap="")
FORMS = (
    HERMES,
    XML,
    TOOLCALL,
    GLM,
    LFM2,
    OLMO3,
    KIMI,
    MINIMAX,
    MINIMAX_LINES,
    APRIEL,
    SEED,
    COMMAND,
    APERTUS,
    COMMAND_R,
    GRANITE,
    FIREFUNCTION,
    GIGACHAT,
    GIGACHAT3,
    GEMMA,
    DEEPSEEK,
    DEEPSEEK_R1,
    DEEPSEEK_V32,
    DEEPSEEK_V4,
    HUNYUAN,
    MISTRAL,
    MISTRAL_WITH_IDS,
    MISTRAL_LIST,
    MINICPM,
    FUNCTIONARY,
    LLAMA3,
)
"""All forms with calls in blocks within text, in the order of trial; Llama 3's is last, as it has no tag."""


PARSERS = {form.parser: form for form in (*FORMS, HARMONY, GENERIC)}
"""All forms, by the names that `tool_call_parser` takes."""


def known_forms() -> str:
    """Return the models whose forms are known, for messages."""
    return "; ".join(form.name for form in (*FORMS, HARMONY))


UNREAD_FORMS = {
    "Kimi K3": "<|open|>",
    "MiniMax M3": "]<]minimax[>[",
    "Solar Open": "<|tool_call:args|>",
    "Muse Glimmer": "<atem:",
    "Functionary 3.2": ">>>all",
}
"""Models whose forms are known and not read -> a text that their chat templates have and no other one's."""


def form_problem(template: str) -> str:
    """Return why the tool calls of a model with this chat template are not read, and which forms are."""
    name = next((name for name, mark in UNREAD_FORMS.items() if mark in template), None)
    if name is not None:
        return f"writes tool calls in the form of {name}, which is not read here; known are those of {known_forms()}"
    return f"shows none of the known forms of tool calls: {known_forms()}"
