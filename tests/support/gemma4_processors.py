"""Gemma 4's processors of videos in transformers, whose modules name torchvision and need little of it."""

from __future__ import annotations

import builtins
import sys
from importlib import import_module
from types import ModuleType

import pytest


def _module(name: str) -> ModuleType:
    """Import transformers' module, with nothing in place of torchvision but a type that it names."""
    functional, v2 = ModuleType("functional"), ModuleType("v2")
    functional.InterpolationMode = v2.functional = functional  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtins, "tvF", functional, raising=False)
        for path in ("torchvision", "torchvision.transforms"):
            patch.setitem(sys.modules, path, ModuleType(path))
        patch.setitem(sys.modules, "torchvision.transforms.v2", v2)
        return import_module(f"transformers.models.{name}.video_processing_{name}")


GEMMA4, UNIFIED = _module("gemma4"), _module("gemma4_unified")
