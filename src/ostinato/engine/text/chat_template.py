"""Conversations to prompts: a checkpoint's Jinja chat template, rendered in an immutable sandbox.

Templates come with checkpoints, from strangers, and expect the environment that Hugging Face documents for them ("Chat
templates", docs of transformers): blocks are trimmed, `break` and `continue` work in loops, `tojson` leaves HTML
characters alone, and `raise_exception`, `strftime_now` and `{% generation %}` exist.

Templates come from strangers, and their work grows with the conversation: two nested loops are enough to stall a
server. Python cannot end a thread, so every iteration of a loop and every call of a macro is counted, and the template
itself asks at each of them whether it may continue.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.visitor

from ostinato.errors import ConfigError, ModelError, Remedy, RequestError, os_error_text
from ostinato.files import find_in_checkpoint, matches
from ostinato.formats.checkpoint_json import read_checkpoint_json

_STEPS_PER_LOOK = 256
"""Steps between two looks at the clock."""
MAX_TEMPLATE_CHARACTERS = 2**25
"""Longest text that a template may make by multiplying or adding. A prompt is far shorter."""


class TemplateBudgetExceeded(Exception):
    """Raised when a template has used up its budget."""


@dataclass(frozen=True, slots=True)
class TemplateBudget:
    """Work that one rendering may take."""

    steps: int = 5_000_000
    seconds: float = 10.0


DEFAULT_TEMPLATE_BUDGET = TemplateBudget()


class TemplateMeter(threading.local):
    """Counter of the steps of the rendering that runs in this thread."""

    left = DEFAULT_TEMPLATE_BUDGET.steps
    until = float("inf")

    @contextmanager
    def limited(self, budget: TemplateBudget) -> Iterator[None]:
        """Limit the work of renderings within. TemplateBudgetExceeded if they take more."""
        before = self.left, self.until
        self.left, self.until = budget.steps, time.monotonic() + budget.seconds
        try:
            yield
        finally:
            self.left, self.until = before

    def step(self) -> str:
        """Count one step, and return an empty string, so that the template prints nothing."""
        self.left -= 1
        if self.left < 0 or (self.left % _STEPS_PER_LOOK == 0 and time.monotonic() > self.until):
            raise TemplateBudgetExceeded
        return ""


class _Limiter(jinja2.visitor.NodeTransformer):
    """Rewrites joins of texts as calls of the environment, since no operator that a sandbox intercepts covers them."""

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        concat = jinja2.nodes.EnvironmentAttribute("join_texts")
        return jinja2.nodes.Call(concat, node.nodes, [], None, None).set_lineno(node.lineno)


class MeteredEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Sandbox whose templates count their steps, and make no text beyond `MAX_TEMPLATE_CHARACTERS`."""

    meter = TemplateMeter()
    intercepted_binops = frozenset({"*", "+", "**"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        template = _Limiter().visit(super()._parse(source, name, filename))
        for node in template.find_all((jinja2.nodes.For, jinja2.nodes.Macro, jinja2.nodes.CallBlock)):
            step = jinja2.nodes.Call(jinja2.nodes.EnvironmentAttribute("step"), [], [], None, None)
            node.body.insert(0, jinja2.nodes.ExprStmt(step).set_lineno(node.lineno))
        parsed: jinja2.nodes.Template = template.set_environment(self)
        return parsed

    def step(self) -> str:
        return self.meter.step()

    def join_texts(self, *parts: object) -> str:
        """Join all parts as text."""
        texts = [str(part) for part in parts]
        _check(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: object, right: object) -> object:
        if operator == "*":
            _check(_length(left) * right if isinstance(right, int) else _length(right) * left)  # type: ignore[operator]
        elif operator == "+":
            _check(_length(left) + _length(right))
        elif isinstance(left, int) and isinstance(right, int):
            _check(abs(right) * left.bit_length())
        return super().call_binop(context, operator, left, right)


def _length(value: object) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _check(size: object) -> None:
    if isinstance(size, int) and size > MAX_TEMPLATE_CHARACTERS:
        raise TemplateBudgetExceeded


# The mark after a message to continue, to find its end in the rendered text. The space after the mark
# shows whether the template trims messages.
_MARK = "\N{OBJECT REPLACEMENT CHARACTER}continue here\N{OBJECT REPLACEMENT CHARACTER}"
_CONTINUE_HERE = _MARK + " "

ChatMessage = Mapping[str, Any]
Role = Literal["system", "developer", "user", "assistant", "tool"]
"""Roles of messages. A template may name further ones."""
_ARGUMENTS = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "template_name")
"""Arguments of `ChatTemplate.render` that callers of LLM may give beside variables."""


class TemplateTooExpensive(RequestError):
    """Error for a template that takes more work for a conversation than its budget."""


class ChatTemplate:
    """Chat templates of one checkpoint, by name. `default` is used, or `tool_use` if there are tools."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str] | None = None) -> None:
        """Keep the templates, which are compiled when first used.

        `special_tokens` (name -> text) are their variables.
        """
        self._templates = dict(templates)
        self._special_tokens = dict(special_tokens or {})
        self._compiled: dict[str, jinja2.Template] = {}
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

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
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
        messages = _checked_messages(messages, self._templates.get(name, ""))
        if continue_final_message:
            if add_generation_prompt:
                raise RequestError("continue_final_message needs add_generation_prompt to be false")
            messages[-1] = _marked(messages[-1])
        variables = {
            **self._special_tokens,
            "messages": messages,
            "tools": _plain(tools),
            "documents": _plain(documents),
            "add_generation_prompt": add_generation_prompt,
            **{key: _plain(value) for key, value in chat_template_kwargs.items()},
        }
        text = _render_safely(lambda: self._template(name).render(variables), budget)
        _check_roles(messages, self._templates[name])
        return _cut_at_mark(text) if continue_final_message else text

    def check_variables(self, names: Iterable[str], tools: Any = None, template_name: str | None = None) -> None:
        """Raise RequestError for variables that the template does not use: it would ignore them in silence."""
        names, name = list(names), self._name(template_name, tools)
        if names and name not in self._variables:
            _render_safely(lambda: self._find_variables(name), DEFAULT_TEMPLATE_BUDGET)
        used = self._variables.get(name, frozenset())
        for unknown in (each for each in names if each not in used):
            if unknown in ("tools", "documents"):
                raise RequestError(f"this model's chat template takes no {unknown}; leave them out", setting=unknown)
            known = sorted(used - self._special_tokens.keys() - {*_ARGUMENTS})
            close = get_close_matches(unknown, known, n=1)
            meant = f" (did you mean {close[0]}?)" if close else ""
            has = f"which knows {', '.join(known)}" if known else "which knows none beside the conversation"
            message = f"{unknown} is no variable of this model's chat template{meant}, {has}"
            raise RequestError(message, setting=unknown)

    def check_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Raise RequestError, as `check_variables`, for arguments of `render` that would be ignored."""
        tools = arguments.get("tools")
        asked = [name for name in arguments if name not in _ARGUMENTS]
        asked += [name for name in ("tools", "documents") if arguments.get(name)]
        self.check_variables(asked, tools, arguments.get("template_name"))

    def _find_variables(self, name: str) -> str:
        self._template(name)  # which names the templates that there are
        parsed = _environment().parse(self._templates[name])
        self._variables[name] = frozenset(jinja2.meta.find_undeclared_variables(parsed))
        return ""

    def _name(self, template_name: str | None, tools: Any) -> str:
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
            self._compiled[name] = _environment().from_string(self._templates[name])
        return self._compiled[name]


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
    """Return a chat template from a separate file.

    ConfigError, with line and cause, if it cannot be read or is not a template.
    """
    remedies = [Remedy("chat_template", None)]
    try:
        text = path.read_text(encoding="utf-8")
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
    return environment


def _render_safely(render: Callable[[], str], budget: TemplateBudget) -> str:
    """Render a template within `budget`. It can fail with any exception; all become a RequestError."""
    try:
        with MeteredEnvironment.meter.limited(budget):
            return render()
    except RequestError:
        raise
    except TemplateBudgetExceeded:
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
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


_SAY_SOMETHING = frozenset({"system", "user"})
"""Roles whose messages need content. An assistant's may be tool calls alone."""


def _checked_messages(messages: Sequence[ChatMessage], template: str) -> list[dict[str, Any]]:
    if isinstance(messages, (str, bytes, Mapping)) or not all(isinstance(m, Mapping) for m in messages):
        raise RequestError('messages must be a list of objects such as {"role": "user", "content": "Hello"}')
    if not messages:
        raise RequestError("a conversation needs at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise RequestError(f"message {index} has no role, such as system, user or assistant")
        if message["role"] in _SAY_SOMETHING and message.get("content") is None:
            raise RequestError(f"message {index}, of the {message['role']}, has no content")
    plain = [_plain(message) for message in messages]
    return plain if "developer" in template else [_as_system(message) for message in plain]


def _check_roles(messages: Sequence[ChatMessage], template: str) -> None:
    """Raise RequestError for a role that a template did not refuse, and does not know."""
    for index, role in enumerate(message["role"] for message in messages):
        # Some templates have roles of their own, such as Llama 3's ipython.
        if role not in get_args(Role) and f"'{role}'" not in template and f'"{role}"' not in template:
            close = get_close_matches(role, get_args(Role), n=1)
            meant = f" (did you mean {close[0]}?)" if close else ""
            known = f"{', '.join(get_args(Role))}, and those that the chat template names"
            raise RequestError(f"message {index} has the role {role!r}{meant}; roles are {known}")


def _as_system(message: dict[str, Any]) -> dict[str, Any]:
    """Return a developer's message as a system's, for a template that does not know developers."""
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _plain(value: Any) -> Any:
    """Return a copy in plain JSON types, so that a template meets no object whose methods have effects."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    raise RequestError(f"chat templates are given strings, numbers, lists and objects, not a {type(value).__name__}")


def _marked(message: dict[str, Any]) -> dict[str, Any]:
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
