"""Conversations to prompts: a checkpoint's Jinja chat template, rendered in an immutable sandbox.

Templates come with checkpoints, from strangers, and expect the environment that Hugging Face documents for them ("Chat
templates", docs of transformers): blocks are trimmed, `break` and `continue` work in loops, `tojson` leaves HTML
characters alone, and `raise_exception`, `strftime_now` and `{% generation %}` exist.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser

from ostinato.engine.text.chat_messages import ChatMessage, check_rendered, checked_messages, plain
from ostinato.engine.text.template_sandbox import (
    DEFAULT_TEMPLATE_BUDGET,
    MAX_TEMPLATE_CHARACTERS,
    MeteredEnvironment,
    TemplateBudget,
    TemplateBudgetExceeded,
)
from ostinato.errors import ConfigError, ModelError, Remedy, RequestError, os_error_text, short_repr
from ostinato.files import find_in_checkpoint, is_stream, matches, read_text
from ostinato.formats.checkpoint_json import read_checkpoint_json
from ostinato.json_io import JsonMapping, JsonObject

# The mark after a message to continue, to find its end in the rendered text. The space after the mark
# shows whether the template trims messages.
_MARK = "\N{OBJECT REPLACEMENT CHARACTER}continue here\N{OBJECT REPLACEMENT CHARACTER}"
_CONTINUE_HERE = _MARK + " "

_MAX_DATE_FORM = 1000
MAX_TEMPLATE_SOURCE = 2**17
"""Longest template that is compiled, in characters; that takes a thousand times as much memory."""
_ARGUMENTS = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "template_name")
"""Arguments of `ChatTemplate.render` that callers of LLM may give beside variables."""


class TemplateTooExpensive(RequestError):
    """Error for a template that takes more work for a conversation than its budget."""


class ChatTemplate:
    """Chat templates of one checkpoint, by name. `default` is used, or `tool_use` if there are tools."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str] | None = None) -> None:
        """Keep the templates; they are compiled when first used. `special_tokens` (name -> text) are variables."""
        self._templates = dict(templates)
        self._special_tokens = dict(special_tokens or {})
        self._compiled: dict[str, jinja2.Template | Exception] = {}
        self._variables: dict[str, frozenset[str]] = {}

    @property
    def has_default(self) -> bool:
        """True if a conversation without tools can be rendered."""
        return "default" in self._templates

    @property
    def as_stored(self) -> str | list[dict[str, str]] | None:
        """Templates in the form of tokenizer_config.json: one, or several with their names; None without any."""
        if self._templates.keys() <= {"default"}:
            return self._templates.get("default")
        return [{"name": name, "template": template} for name, template in self._templates.items()]

    @property
    def text(self) -> str:
        """Source of all templates, which shows in what form the model writes its answers."""
        return "\n".join(self._templates.values())

    def compile(self) -> None:
        """Compile all templates, which takes some milliseconds each. Their errors are raised when they are rendered."""
        for name in self._templates:
            with suppress(Exception):
                self._template(name)

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[JsonMapping] | None = None,
        documents: Sequence[JsonMapping] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_name: str | None = None,
        budget: TemplateBudget = DEFAULT_TEMPLATE_BUDGET,
        **chat_template_kwargs: Any,
    ) -> str:
        """Return the prompt of a conversation, with all special tokens in it.

        `messages` are objects with a `role`; `tools` are JSON schemas of functions. The prompt ends with the header of
        the answer, or, with `continue_final_message`, within the last message. `chat_template_kwargs` are further
        variables of the template. RequestError if the checkpoint has no such template, the template refuses the
        conversation or fails, or it tries to leave the sandbox or takes more than the `budget`.
        """
        name = self._name(template_name, tools)
        messages = checked_messages(messages, self._templates.get(name, ""))
        if continue_final_message:
            if add_generation_prompt:
                raise RequestError("continue_final_message needs add_generation_prompt to be false")
            messages[-1] = _marked(messages[-1])
        variables = {
            **self._special_tokens,
            "messages": messages,
            "tools": plain(tools),
            "documents": plain(documents),
            "add_generation_prompt": add_generation_prompt,
            **{key: plain(value) for key, value in chat_template_kwargs.items()},
        }
        text = _render_safely(lambda: self._template(name).render(variables), budget)
        check_rendered(messages, self._templates[name], text)
        return _cut_at_mark(text) if continue_final_message else text

    def check_variables(self, names: Iterable[str], tools: Any = None, template_name: str | None = None) -> None:
        """Raise RequestError for variables that the template does not use: it would ignore them in silence."""
        names, name = list(names), self._name(template_name, tools)
        if names and name not in self._variables:
            _render_safely(lambda: self._find_variables(name), DEFAULT_TEMPLATE_BUDGET)
        used = self._variables.get(name, frozenset())
        unknown = [each for each in names if each not in used]
        if not unknown:
            return
        if unknown[0] in ("tools", "documents"):
            instead = ", or let ToolChat call them (tool_call_parser)" * (unknown[0] == "tools")
            message = f"this model's chat template takes no {unknown[0]}; leave them out{instead}"
            raise RequestError(message, setting=unknown[0])
        known = sorted(used - self._special_tokens.keys() - {*_ARGUMENTS})
        close = get_close_matches(unknown[0], known, n=1)
        meant = f" (did you mean {close[0]}?)" if close else ""
        has = f"which knows {', '.join(known)}" if known else "which knows none beside the conversation"
        are = f"{', '.join(unknown)} are no variables" if unknown[1:] else f"{unknown[0]} is no variable"
        raise RequestError(f"{are} of this model's chat template{meant}, {has}", setting=unknown[0])

    def check_arguments(self, arguments: JsonMapping) -> None:
        """Raise RequestError, as `check_variables`, for arguments of `render` that would be ignored or mean nothing."""
        for name in ("add_generation_prompt", "continue_final_message"):
            if not isinstance(arguments.get(name, False), bool):
                raise RequestError(f"{name} {arguments[name]!r} should be True or False", setting=name)
        for name in ("tools", "documents"):
            value = arguments.get(name)
            if value is not None and not (
                isinstance(value, list | tuple) and all(isinstance(each, Mapping) for each in value)
            ):
                raise RequestError(f"{name} should be a list of objects, not {short_repr(value)}", setting=name)
        tools = arguments.get("tools")
        asked = [name for name in arguments if name not in _ARGUMENTS]
        asked += [name for name in ("tools", "documents") if arguments.get(name)]
        self.check_variables(asked, tools, arguments.get("template_name"))

    def _find_variables(self, name: str) -> str:
        self._template(name)  # which names the templates that there are
        parsed = _environment().parse(self._templates[name])
        self._variables[name] = frozenset(jinja2.meta.find_undeclared_variables(parsed))
        return ""

    def _name(self, template_name: str | None, tools: object) -> str:
        return template_name or ("tool_use" if tools and "tool_use" in self._templates else "default")

    def _template(self, name: str) -> jinja2.Template:
        if name not in self._compiled:
            if not self._templates:
                raise RequestError(
                    "this checkpoint has no chat template, so it cannot chat; give a prompt to generate instead"
                )
            if name not in self._templates:
                known = ", ".join(sorted(self._templates))
                raise RequestError(f"this checkpoint has no chat template {name!r}; it has {known}")
            self._compiled[name] = _compiled(self._templates[name])
        compiled = self._compiled[name]
        if isinstance(compiled, Exception):
            raise compiled.with_traceback(None)
        return compiled


def _compiled(text: str) -> jinja2.Template | Exception:
    """Return a template, or the error that it has, so that it is not compiled again."""
    if len(text) > MAX_TEMPLATE_SOURCE:
        most = f"may have {MAX_TEMPLATE_SOURCE:,} (chat_template names another)"
        return RequestError(f"the chat template has {len(text):,} characters, and {most}")
    try:
        return _environment().from_string(text)
    except Exception as error:
        return error


def load_chat_template(directory: Path, special_tokens: Mapping[str, str] | None = None) -> ChatTemplate:
    """Return the chat templates of a checkpoint directory, none if it has none.

    They are in `chat_template.jinja` and `additional_chat_templates/NAME.jinja`, else under `chat_template` in
    tokenizer_config.json: one text, or a list of objects with `name` and `template`. ModelError if a file is damaged.
    """
    found: dict[str, str] = {}
    value = read_checkpoint_json(directory, "tokenizer_config.json").get("chat_template")
    if isinstance(value, str):
        found["default"] = value
    elif isinstance(value, list):
        named = [(each.get("name"), each.get("template")) for each in value if isinstance(each, dict)]
        found |= {name: text for name, text in named if isinstance(name, str) and isinstance(text, str)}
    more = matches(directory / "additional_chat_templates", "*.jinja")
    files = {path.stem: str(path.relative_to(directory)) for path in more} | {"default": "chat_template.jinja"}
    for name, file in files.items():
        path = find_in_checkpoint(directory, file)
        if path is None:
            continue
        try:
            found[name] = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{path} cannot be read: {os_error_text(error)}") from None
    return ChatTemplate(found, special_tokens)


def read_chat_template(path: Path) -> str:
    """Return a chat template from a separate file. ConfigError, with line and cause, if it is none or unreadable."""
    remedies = [Remedy("chat_template", None)]
    if is_stream(path):
        message = f"the chat template {path} is a pipe or a device; give a file, which several processes read"
        raise ConfigError(message, remedies)
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the chat template {path} cannot be read: {os_error_text(error)}", remedies) from None
    if not text.strip():
        raise ConfigError(f"the chat template {path} is empty", remedies)
    if "messages" not in text:
        message = f"the chat template {path} does not use `messages`: every conversation would be the same prompt"
        raise ConfigError(message, remedies)
    try:
        _environment().from_string(text)
    except jinja2.TemplateSyntaxError as error:
        message = f"the chat template {path} is not valid, at line {error.lineno}: {error.message}"
        raise ConfigError(message, remedies) from None
    except RecursionError:
        raise ConfigError(f"the chat template {path} is nested too deeply", remedies) from None
    return text


class _GenerationBlocks(jinja2.ext.Extension):
    """Extension for `{% generation %}`, which marks answers for training. Its content is rendered as if unmarked."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own interface)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> MeteredEnvironment:
    environment = MeteredEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlocks]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    # A function has no methods that a template could reach, unlike the class.
    environment.globals["dict"] = _make_dict
    environment.count_all()
    return environment


def _render_safely(render: Callable[[], str], budget: TemplateBudget) -> str:
    """Render a template within `budget`. It can fail with any exception; all become a RequestError."""
    try:
        with MeteredEnvironment.meter.limited(budget):
            return render()
    except RequestError:
        raise
    except (TemplateBudgetExceeded, MemoryError):
        raise TemplateTooExpensive(
            f"the chat template takes more than {budget.steps:,} steps, {budget.seconds:g} seconds or "
            f"{MAX_TEMPLATE_CHARACTERS:,} characters for this conversation"
        ) from None
    except jinja2.TemplateSyntaxError as error:
        raise RequestError(f"the chat template is not valid, at line {error.lineno}: {error.message}") from None
    except jinja2.exceptions.SecurityError as error:
        raise RequestError(f"the chat template tried to leave its sandbox: {error}") from None
    except jinja2.TemplateError as error:
        raise RequestError(f"the chat template refused the conversation: {error.message}") from None
    except Exception as error:
        raise RequestError(f"the chat template failed on the conversation: {type(error).__name__}: {error}") from None


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    if len(form) > _MAX_DATE_FORM:
        raise jinja2.TemplateError(f"strftime_now takes a format of at most {_MAX_DATE_FORM} characters")
    return datetime.now().strftime(form)


def _make_dict(*args: object, **kwargs: object) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _marked(message: JsonObject) -> JsonObject:
    """Return the message with a mark at the end of its text."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + _CONTINUE_HERE}
    if isinstance(content, list):
        for index in range(len(content) - 1, -1, -1):
            if isinstance(content[index], dict) and isinstance(content[index].get("text"), str):
                part = {**content[index], "text": content[index]["text"] + _CONTINUE_HERE}
                return {**message, "content": [*content[:index], part, *content[index + 1 :]]}
    raise RequestError("continue_final_message needs a last message with text")


def _cut_at_mark(text: str) -> str:
    end = text.rfind(_MARK)
    if end < 0:
        raise RequestError("the chat template does not give out the last message, so it cannot be continued")
    return text[:end] if text.startswith(_CONTINUE_HERE, end) else text[:end].rstrip()
