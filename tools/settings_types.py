"""Writes src/ostinato/engine/llm_settings.py, the keywords of `LLM` for editors, from the fields of EngineConfig.

Run it after a change of a setting: python tools/settings_types.py
"""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from ostinato.config import EngineConfig
from ostinato.setting_names import ALIASES

MODULE = Path(__file__).parent.parent / "src/ostinato/engine/llm_settings.py"
HEAD = '''"""The keywords of `LLM` and `AsyncLLM`, for editors and type checkers.

`tools/settings_types.py` makes this file from the fields of EngineConfig.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from ostinato.config_fields import Speculative


class LLMSettings(TypedDict, total=False):
    """All settings but `model`; docs/settings.md says what they mean."""

'''
ALSO = {
    "cache_memory": "int | str | None",
    "cache_offload": "int | str | None",
    "speculative": "Speculative | Mapping[str, Any] | str | None",
}
"""Settings that are also taken in other forms than the one in which they are kept."""


def module() -> str:
    """The text of the file."""
    fields = {name: field for name, field in EngineConfig.model_fields.items() if name != "model"}
    lines = [f"    {name}: {ALSO.get(name) or _type(field.annotation)}\n" for name, field in fields.items()]
    lines.append("    # vLLM's names.\n")
    for alias, name in ALIASES.items():
        lines.append(f"    {alias}: {ALSO.get(name) or _type(fields[name].annotation)}\n")
    return HEAD + "".join(lines)


def _type(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "Literal[" + ", ".join(f'"{value}"' for value in get_args(annotation)) + "]"
    if get_origin(annotation) in (types.UnionType, Union):
        return " | ".join(_type(kind) for kind in get_args(annotation))
    if get_origin(annotation) is tuple:
        return "Sequence[int] | str"
    return "None" if annotation is type(None) else str(annotation.__name__)


if __name__ == "__main__":
    MODULE.write_text(module(), encoding="utf-8")
