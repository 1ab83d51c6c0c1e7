"""The chat template of a shipped checkpoint, rendered as its readers do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment


def render(directory: Path, messages: Sequence[Mapping[str, Any]], begin_answer: bool = True) -> str:
    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    template = environment.from_string((directory / "chat_template.jinja").read_text())
    return template.render(messages=messages, add_generation_prompt=begin_answer)
