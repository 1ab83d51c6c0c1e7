"""Writes docs/settings.md and docs/server-settings.md from the fields of EngineConfig and ServeSettings.

Run it after a change of a setting: python tools/settings_page.py
"""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ostinato.config import ALIASES, EngineConfig
from ostinato.serve.settings import ServeSettings

DOCS = Path(__file__).parent.parent / "docs"
ENGINE = """# All settings

Each setting is a keyword of `LLM` and `EngineConfig`, and a flag of every command: `max_num_seqs` is `--max-num-seqs`.
A flag that is on or off has a second form: `--no-enable-prefix-caching`. Where the default is *open*, the plan chooses
a value that fits; the text says in brackets which it tries first. Where vLLM has another name, that works too.

`tools/settings_page.py` makes this page from the code. The server has [settings of its own](server-settings.md).

| setting | values | default | meaning |
|---|---|---|---|
"""
SERVER = """# Settings of the server

`ostinato serve` has these flags beside [those of the engine](settings.md). A flag is the setting's name with dashes:
`--max-waiting 64`. `tools/settings_page.py` makes this page from the code.

| setting | values | default | meaning |
|---|---|---|---|
"""
OFF_BY_DEFAULT = {"revision", "speculative"}
"""Settings of the engine whose default None means that there is none, and not that the plan chooses."""


def engine_page() -> str:
    return ENGINE + _rows(EngineConfig, ALIASES, "open")


def server_page() -> str:
    return SERVER + _rows(ServeSettings, {}, "none")


def _rows(settings: type[BaseModel], aliases: dict[str, str], no_default: str) -> str:
    return "".join(_row(name, field, aliases, no_default) for name, field in settings.model_fields.items())


def _row(name: str, field: FieldInfo, aliases: dict[str, str], no_default: str) -> str:
    text = " ".join((field.description or "").split()).replace("|", "\\|")
    text += "".join(f" vLLM's name: `{alias}`." for alias, setting in aliases.items() if setting == name)
    default = _default(field.default, "none" if name in OFF_BY_DEFAULT else no_default)
    return f"| `{name}` | {_values(field.annotation)} | {default} | {text} |\n"


def _values(annotation: Any) -> str:
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in kinds)
    if get_origin(annotation) in (types.UnionType, Union):
        return _values(kinds[0])
    if get_origin(annotation) is tuple:
        return "a list of " + {int: "whole numbers", str: "texts"}[kinds[0]]
    names = {bool: "on, off", int: "whole number", float: "number", str: "text", Path: "path"}
    return names.get(annotation, "text")


def _default(value: Any, no_default: str) -> str:
    if value in (None, ()):
        return no_default
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{value}`"


if __name__ == "__main__":
    (DOCS / "settings.md").write_text(engine_page(), encoding="utf-8")
    (DOCS / "server-settings.md").write_text(server_page(), encoding="utf-8")
