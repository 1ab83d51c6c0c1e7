"""What a processor was measured to do: the rates from which the plan predicts a step's time, kept in files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from ostinato.plain_data import from_plain, save_json
from ostinato.plan.device.instruction_sets import PACKAGE, module_file

Way = Literal["decode", "prompt"]


@dataclass(frozen=True)
class KernelRate:
    """What one kernel reached with so many tokens, of decode rows or of one prompt, on what is stored in `storage`
    (`int8`: weights of 8 bits): the bytes and the operations of its work (`ops/work.py`) over the seconds it took. For
    a kernel that only passes over activations, bytes are those of its result."""

    operation: str
    storage: str
    way: Way
    tokens: int
    bytes_per_second: float
    flops_per_second: float


@dataclass(frozen=True)
class Rates:
    """Of a processor, with the kernels of one file, `threads` threads and a model in `dtype`."""

    processor: str
    kernels: str
    """The instruction set, and a digest of the file that has them."""
    threads: int
    dtype: str
    measured: str
    """When: date and time, UTC."""
    bandwidth: float
    """Bytes/s from memory."""
    product_rate: float
    """FLOP/s of a product of many tokens."""
    call_seconds: float
    """Of one kernel with nothing to do."""
    step_seconds: float
    """Of the engine around a step: scheduling, inputs, sampling, outputs."""
    row_seconds: float
    """The same, for each row."""
    others: float
    """The part of the processors' time that other work took meanwhile. Where it is large, the rates are low."""
    rates: tuple[KernelRate, ...]


def cache_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Where a user's programs keep what they can make anew (the XDG base directory specification)."""
    given = environ.get("XDG_CACHE_HOME")
    return (Path(given) if given else Path.home() / ".cache") / "ostinato"


def kernels_of(isa: str, package: Path = PACKAGE) -> str:
    """The kernels of an instruction set, by the digest of their file: others may be faster or slower."""
    path = module_file(isa, package)
    assert path is not None, "kernels that the plan has chosen are installed"
    return f"{isa} {hashlib.blake2b(path.read_bytes(), digest_size=6).hexdigest()}"


def save_rates(rates: Rates, directory: Path) -> Path:
    """Keeps them, in place of older ones of the same processor, threads and dtype -> the file."""
    key = hashlib.blake2b(rates.processor.encode(), digest_size=4).hexdigest()
    path = directory / f"rates-{key}-{rates.threads}-{rates.dtype}.json"
    directory.mkdir(parents=True, exist_ok=True)
    save_json(rates, path)
    return path


def kept_rates(processor: str, directory: Path) -> tuple[Rates, ...]:
    """All that are kept of a processor. What cannot be read counts as absent: it can be measured anew."""
    found = []
    for path in sorted(directory.glob("rates-*.json")):
        try:
            rates = from_plain(Rates, json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, ValidationError):
            continue
        if rates.processor == processor:
            found.append(rates)
    return tuple(found)
