"""What takes transformers seconds is found once, and kept in build/ for other processes and later runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import torch
import transformers

from ostinato.media import media_item, media_prompt
from ostinato.ops import noise
from ostinato.ops.quant import quantize

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
HERE = ("checkpoints.py", "int8_cache.py", "kept.py", "parity.py", "recipes.py", "vision_parity.py", "vl_models.py")
MADE_BY = [
    *(Path(__file__).parent / each for each in HERE),
    *(Path(each.__file__) for each in (quantize, noise, media_item, media_prompt)),
]
"""The files that say how it is found, and what it consists of."""


def kept(key: tuple[object, ...], find: Callable[[], T]) -> T:
    """What `find` gives, a function of `key` and of what `_makers` counts alone."""
    file = ROOT / "build" / "kept" / _makers() / f"{sha256(repr(key).encode()).hexdigest()}.pt"
    if file.exists():
        found: T = torch.load(file, weights_only=False)
        return found
    found = find()
    file.parent.mkdir(parents=True, exist_ok=True)
    own = file.with_suffix(f".{os.getpid()}")
    torch.save(found, own)
    own.replace(file)  # whole, whoever else finds it now
    return found


@cache
def _makers() -> str:
    """A digest of all else that a result follows from: who finds it, and the machine whose rounding it has."""
    versions = (torch.__version__, transformers.__version__, torch.backends.cpu.get_cpu_capability())
    digest = sha256(repr(versions).encode())
    for file in MADE_BY:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
