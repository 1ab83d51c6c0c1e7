"""Writes the pages of settings in docs/ from the fields of EngineConfig and ServeSettings.

Run it after a change of a setting: python tools/settings_page.py
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from ostinato.cli.help import ENGINE_GROUPS
from ostinato.config import BYTE_SETTINGS, EngineConfig
from ostinato.serve.settings import BYTE_SETTINGS as OF_SERVER
from ostinato.serve.settings import ServeSettings
from ostinato.setting_names import ALIASES
from ostinato.units import exact_bytes

DOCS = Path(__file__).parent.parent / "docs"
HEAD = """| setting | values | default | meaning |
|---|---|---|---|
"""
ENGINE = """# All settings

Each setting is a keyword of `LLM` and `EngineConfig`, and a flag of every command: `max_num_seqs` is `--max-num-seqs`.
A flag that is on or off has a second form: `--no-enable-prefix-caching`. Where the default is *open*, the plan chooses
a value that fits; the text says in brackets which it tries first. Where vLLM has another name, that works too. A size
is a number of bytes, or is written as 512MiB, 4g or 2GB (10^9).

`tools/settings_page.py` makes this page from the code. Those of [kernels, graphs and images](graph-settings.md) have a
page of their own, and [those of the server](server-settings.md) too.
"""
GRAPHS = """# Settings of kernels, graphs and images

These are keywords of `LLM` and flags of every command, as [the other settings](settings.md) are.
`tools/settings_page.py` makes this page from the code.
"""
OF_GRAPHS = ("kernels and graphs", "images")
"""Groups of settings, as help has them, on the page of graphs."""
SERVER = """# Settings of the server

`ostinato serve` has these flags beside [those of the engine](settings.md). A flag is the setting's name with dashes:
`--max-waiting 64`. A size is a number of bytes, or is written as 512MiB, 4g or 2GB (10^9). `tools/settings_page.py`
makes this page from the code.

"""
SIZES = {*BYTE_SETTINGS, *OF_SERVER}
OFF_BY_DEFAULT = {"record", "revision", "download_dir", "tokenizer", "chat_template", "speculative"}
"""Settings of the engine whose default None means that there is none, and not that the plan chooses."""


def pages() -> dict[str, str]:
    """Name -> text."""
    of_graphs = [title for title in ENGINE_GROUPS if title in OF_GRAPHS]
    others = [title for title in ENGINE_GROUPS if title not in OF_GRAPHS]
    return {
        "settings.md": ENGINE + _groups(others),
        "graph-settings.md": GRAPHS + _groups(of_graphs),
        "server-settings.md": SERVER + HEAD + _rows(ServeSettings.model_fields, {}, "none"),
    }


def _groups(titles: list[str]) -> str:
    """A table for each group."""
    fields = EngineConfig.model_fields
    tables = [
        f"\n## {title.capitalize()}\n\n{HEAD}"
        + _rows({name: fields[name] for name in ENGINE_GROUPS[title]}, ALIASES, "open")
        for title in titles
    ]
    return "".join(tables)


def _rows(fields: Mapping[str, FieldInfo], aliases: dict[str, str], no_default: str) -> str:
    return "".join(_row(name, field, aliases, no_default) for name, field in fields.items())


def _row(name: str, field: FieldInfo, aliases: dict[str, str], no_default: str) -> str:
    text = " ".join((field.description or "").split()).replace("|", "\\|")
    text += "".join(f" vLLM's name: `{alias}`." for alias, setting in aliases.items() if setting == name)
    default, values = field.default, _values(field.annotation)
    if name in SIZES:
        default, values = default and exact_bytes(default), "size"
    default = _default(default, "none" if name in OFF_BY_DEFAULT else no_default)
    return f"| `{name}` | {values} | {default} | {text} |\n"


def _values(annotation: Any) -> str:
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in kinds)
    if get_origin(annotation) in (types.UnionType, Union):
        return _values(kinds[0])
    if get_origin(annotation) is tuple:
        return "a list of " + {int: "integers", str: "texts"}[kinds[0]]
    names = {bool: "on, off", int: "integer", float: "number", str: "text", Path: "path"}
    return names.get(annotation, "text")


def _default(value: Any, no_default: str) -> str:
    if value in (None, ()):
        return no_default
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{value}`"


if __name__ == "__main__":
    for page, text in pages().items():
        (DOCS / page).write_text(text, encoding="utf-8")
