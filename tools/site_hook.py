"""A hook of mkdocs.yml: the colours of the server's page for the site, and commands for its copy buttons.

The buttons take a block's commands, without prompts, remarks and output.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from html import escape, unescape
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

_BLOCK = re.compile(r'<div class="language-console highlight">(.*?)</pre>', re.DOTALL)
_TAG = re.compile(r"<[^>]+>")
_REMARK = re.compile(r"\s+#\s.*$")

_PAGE_STYLES = Path(__file__).parent.parent / "src/ostinato/serve/page/styles/base.css"
_COLOUR = re.compile(r"^ *(--[\w-]+): (light-dark\(.*\));$", re.MULTILINE)


def colours() -> dict[str, str]:
    """Return the colours of the server's page: name of the variable -> light and dark value."""
    return dict(_COLOUR.findall(_PAGE_STYLES.read_text(encoding="utf-8")))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add `docs/palette.css` with the colours of the server's page."""
    from mkdocs.structure.files import File

    rules = "".join(f"  {name}: {value};\n" for name, value in colours().items())
    files.append(File.generated(config, "docs/palette.css", content=f":root {{\n{rules}}}\n"))
    return files


def on_page_content(html: str, **_: Any) -> str:
    """The page, where each block of commands has them as `data-copy`, which the theme's button takes."""
    return _BLOCK.sub(_with_commands, html)


def _with_commands(block: re.Match[str]) -> str:
    commands = "\n".join(commands_in(unescape(_TAG.sub("", block[1]))))
    return block[0].replace("<div ", f'<div data-copy="{escape(commands)}" ', 1)


def commands_in(text: str) -> Iterator[str]:
    """The commands of a block, whose lines begin with a prompt and go on while a quote or a backslash is open."""
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith("$ "):
            command = line[2:]
            while (words := _words(command)) is None and (following := next(lines, None)) is not None:
                command += f"\n{following}"
            bare = _REMARK.sub("", command)
            yield bare if _words(bare) == words else command


def _words(command: str) -> list[str] | None:
    """Those of a whole command; None where it goes on."""
    try:
        return None if command.endswith("\\") else shlex.split(command, comments=True)
    except ValueError:
        return None
