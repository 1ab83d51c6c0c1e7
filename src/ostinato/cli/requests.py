"""Common parts of the commands that make requests: sampling settings as flags, and chat templates."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo

from ostinato.cli.options import described, setting_flag, with_flags
from ostinato.errors import RequestError, os_error_text
from ostinato.sample.guide import Guide
from ostinato.sample.params import SamplingParams

_GUIDE = "guide_"
_TEXTS_IN_FILES = ("guide_json_schema", "guide_lark")
PANEL = "Sampling (left open: as generation_config.json says, else greedy)"

TemplateVariables = Annotated[
    str | None,
    typer.Option(
        "--chat-template-kwargs",
        metavar="JSON",
        help="Variables of the chat template, such as '{\"enable_thinking\": false}'.",
    ),
]


def sampling_options(
    leave_out: Collection[str] = (),
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command a flag for every sampling setting but those in `leave_out`.

    The command takes `sampling: dict[str, Any]`, which receives the given settings. Lists are given by repeating the
    flag; a logit bias is written ID=BIAS. Each kind of guide has a flag, and its schema or grammar is a file or the
    text itself.
    """
    return lambda command: with_flags(command, "sampling", _request_flags(leave_out), _values)


def as_message(text: str, role: str = "user") -> dict[str, str]:
    """Return `text` as a message of a conversation."""
    return {"role": role, "content": text}


def read_prompts(file: Path) -> tuple[str, ...]:
    """Return the lines of a file, or of stdin as `-`, that are not blank. RequestError if there are none."""
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"the prompts in {file} cannot be read: {os_error_text(error)}") from None
    lines = tuple(line for line in text.splitlines() if line.strip())
    if not lines:
        raise RequestError(f"there is no prompt in {file}; put one on each line")
    return lines


def template_variables(text: str | None) -> dict[str, Any]:
    """Return the object that `--chat-template-kwargs` holds; RequestError if it is anything else."""
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise RequestError(f"--chat-template-kwargs is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(f"--chat-template-kwargs should be a JSON object, not {text}")
    if taken := {"messages", "params"} & value.keys():
        raise RequestError(f"--chat-template-kwargs cannot hold {' or '.join(sorted(taken))}, which the command sets")
    return value


def _request_flags(leave_out: Collection[str]) -> Iterator[inspect.Parameter]:
    fields: dict[str, FieldInfo] = {}
    for name, field in SamplingParams.model_fields.items():
        if name in leave_out:
            continue
        of_guide = {f"{_GUIDE}{kind}": each for kind, each in Guide.model_fields.items()}
        fields |= of_guide if name == "guide" else {name: field}
    for name, field in fields.items():
        yield setting_flag(
            name,
            field,
            # generation_config.json has the defaults of the others.
            described(field) if name == "max_tokens" else str(field.description),
            "FILE|TEXT" if name in _TEXTS_IN_FILES else None,
            rich_help_panel=PANEL,
        )


def _values(given: dict[str, Any]) -> dict[str, Any]:
    """Return the given flags as SamplingParams takes them. An empty list is a flag that was not given."""
    values = {name: value for name, value in given.items() if value != []}
    if "logit_bias" in values:
        values["logit_bias"] = dict(_bias(entry) for entry in values["logit_bias"])
    if guide := {name: values.pop(name) for name in list(values) if name.startswith(_GUIDE)}:
        texts = {name: _text(name, guide[name]) for name in guide if name in _TEXTS_IN_FILES}
        values["guide"] = {name.removeprefix(_GUIDE): value for name, value in (guide | texts).items()}
    return values


def _text(name: str, given: str) -> str:
    """Return a flag's text: `given` itself if it has several lines or is in braces, else that of the file it names."""
    if given.lstrip().startswith("{") or "\n" in given.strip() or given.startswith("start:"):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        flag = "--" + name.replace("_", "-")
        message = f"{flag} {given} is neither the text itself nor a file that can be read: {os_error_text(error)}"
        raise RequestError(message) from None


def _bias(entry: str) -> tuple[int, float]:
    token_id, _, bias = entry.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise RequestError(f"--logit-bias {entry!r} should be ID=BIAS, such as 17=-5") from None
