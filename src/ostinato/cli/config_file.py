"""Settings from a file: `--config FILE.yaml`, and `ostinato serve --print-config`, which writes one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import typer
import yaml
from pydantic import BaseModel

from ostinato.cli.groups import groups
from ostinato.cli.output import note
from ostinato.errors import ConfigError, os_error_text

_NO_SETTINGS = ("config_file", "help_all", "print_config")
"""Flags that are not settings."""


def read_config_file(ctx: typer.Context, path: Path) -> None:
    """Make the file's settings the defaults of the command's flags.

    ConfigError for a file that cannot be read, and for a name that is no setting. Another command's setting is noted
    and ignored, so that one file serves both `plan` and `serve`.
    """
    try:
        read = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the settings in {path} cannot be read: {os_error_text(error)}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {_what_is_wrong(error)}") from None
    if not isinstance(read, dict | None):
        raise ConfigError(f"{path} should have a line `name: value` for each setting, and holds {read!r}")
    options = {
        str(param.name): param
        for param in ctx.command.params
        if param.param_type_name == "option" and param.name not in _NO_SETTINGS
    }
    given: dict[str, Any] = {}
    others: list[str] = []
    for key, value in (read or {}).items():
        name = str(key).removeprefix("--").replace("-", "_")
        if name not in options and name in groups():
            others.append(name)
            continue
        if name not in options:
            near = get_close_matches(name, options, 1)
            also = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{path}: {ctx.info_name} has no setting {key!r}{also}")
        if name in given:
            raise ConfigError(f"{path}: {name} is given twice")
        if value is not None:
            given[name] = _as_argument(value, is_list=getattr(options[name], "multiple", False))
    if others:
        note(f"{path}: {ctx.info_name} passes over what is another command's: {', '.join(others)}")
    ctx.default_map = {**(ctx.default_map or {}), **given}


def print_config(settings: BaseModel) -> Iterator[str]:
    """Yield the lines of a file with these settings, each below its description.

    Settings at their default are comments, and so are secrets (fields with `repr=False`), whose values are left out.
    """
    plain = settings.model_dump(mode="json")
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        yield f"# {' '.join((field.description or '').split())}"
        if value is None or value == () or not field.repr:
            yield f"# {name}:"
            continue
        line = yaml.safe_dump({name: plain[name]}, default_flow_style=False, width=10**6).rstrip()
        yield f"# {line}" if value == field.default else line


def _as_argument(value: Any, *, is_list: bool) -> Any:
    """Return a value in the form in which a flag would bring it."""
    if is_list:
        return [str(each) for each in (value if isinstance(value, list) else [value])]
    if isinstance(value, list):
        return ",".join(map(str, value))
    return json.dumps(value) if isinstance(value, dict) else value


def _what_is_wrong(error: yaml.YAMLError) -> str:
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem is None or error.problem_mark is None:
        return " ".join(str(error).split())
    return f"{error.problem}, in line {error.problem_mark.line + 1}"
