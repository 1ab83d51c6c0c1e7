"""Writes src/ostinato/setting_types.py: the keywords of LLM, EngineConfig, SamplingParams and Guide, for editors.

Run it after a change of a setting: python tools/settings_types.py
"""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from ostinato.config import EngineConfig
from ostinato.sampling.guide import Guide
from ostinato.sampling.params import SamplingParams
from ostinato.setting_names import ALIASES

MODULE = Path(__file__).parent.parent / "src/ostinato/setting_types.py"
HEAD = '''"""The keywords of LLM, EngineConfig, SamplingParams and Guide, for editors and type checkers.

`tools/settings_types.py` makes this file from the fields of the last three.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from ostinato.config_fields import Speculative

if TYPE_CHECKING:
    import torch


class LLMSettings(TypedDict, total=False):
    """All settings but `model`; docs/settings.md says what they mean."""

'''
ENGINE = '''

class EngineSettings(LLMSettings, total=False):
    """All settings."""

    model: str | PathLike[str]


class GuideSettings(TypedDict, total=False):
    """Fields of Guide, in the forms that it takes."""

'''
SAMPLING = '''

class SamplingSettings(TypedDict, total=False):
    """Fields of SamplingParams but `guide`, in the forms that it takes."""

'''
_NAMES, _PATH = "list[str] | tuple[str, ...]", "str | PathLike[str] | None"
ALSO = {
    **dict.fromkeys(("download_dir", "tokenizer", "chat_template", "cache_dir"), _PATH),
    "json_schema": "dict[str, Any] | str | type | None",
    "choice": _NAMES,
    "logit_bias": "dict[int, float] | dict[str, float] | None",
    "stop": f"str | {_NAMES} | None",
    "stop_token_ids": "list[int] | tuple[int, ...] | set[int] | frozenset[int] | None",
    "cache_memory": "int | str | None",
    "cache_offload": "int | str | None",
    "speculative": "Speculative | Mapping[str, Any] | str | None",
}
"""Settings that are also taken in other forms than the one in which they are kept."""


def module() -> str:
    """The text of the file."""
    fields = EngineConfig.model_fields
    aliases = [f"    {alias}: {_taken(name, fields[name].annotation)}\n" for alias, name in ALIASES.items()]
    llm = [*_lines(EngineConfig, "model"), "    # vLLM's names.\n", *aliases]
    return "".join([HEAD, *llm, ENGINE, *_lines(Guide), SAMPLING, *_lines(SamplingParams, "guide")])


def _lines(model: type[BaseModel], without: str = "") -> list[str]:
    fields = {name: field.annotation for name, field in model.model_fields.items() if name != without}
    return [f"    {name}: {_taken(name, annotation)}\n" for name, annotation in fields.items()]


def _taken(name: str, annotation: Any) -> str:
    """The type of a setting in all forms in which it is taken."""
    torch = {"dtype": " | torch.dtype", "device": " | torch.device"}.get(name.rpartition("_")[2], "")
    return ALSO.get(name) or _type(annotation) + torch


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
