"""Measured rates of a processor, from which the plan predicts a step's time. They are kept in files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from ostinato.files import home, matches
from ostinato.json_io import from_plain, parse_json, save_json
from ostinato.plan.device.kernel_support import PACKAGE, module_file

StepKind = Literal["decode", "prompt"]


@dataclass(frozen=True)
class KernelRate:
    """Measured rate of one kernel with `tokens` tokens, of decode rows or of one prompt.

    `storage` is the dtype of the stored data (`int8`: weights of 8 bits). The rates are the bytes and the operations of
    its work (`ops/kernel_cost.py`) divided by the seconds it took. For a kernel that only passes over activations,
    bytes are those of its result.
    """

    operation: str
    storage: str
    way: StepKind
    tokens: int
    bytes_per_second: float
    flops_per_second: float


@dataclass(frozen=True)
class Rates:
    """Measured rates of a processor with one build of the kernels, a number of threads and a dtype."""

    processor: str
    kernels: str
    """Instruction set, and a digest of the file with its kernels."""
    threads: int
    dtype: str
    measured: str
    """Date and time of the measurement, UTC."""
    bandwidth: float
    """Bytes/s from memory."""
    product_rate: float
    """FLOP/s of a large-m matmul."""
    call_seconds: float
    """Seconds of one kernel with nothing to do."""
    step_seconds: float
    """Seconds of the engine around a step: scheduling, inputs, sampling, outputs."""
    row_seconds: float
    """Seconds of the engine for each row."""
    other_load: float
    """Share of the processors' time that other work took meanwhile. If it is large, the rates are too low."""
    rates: tuple[KernelRate, ...]


def cache_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the directory for files that can be created again (the XDG base directory specification)."""
    given = environ.get("XDG_CACHE_HOME", "")
    # A relative path is to be ignored: each working directory would have another.
    return (Path(given) if os.path.isabs(given) else home() / ".cache") / "ostinato"


def kernels_of(isa: str, package: Path = PACKAGE) -> str:
    """Return an identity of an instruction set's kernels by their file's digest: others may be faster or slower."""
    path = module_file(isa, package)
    assert path is not None, "kernels that the plan has chosen are installed"
    return f"{isa} {hashlib.blake2b(path.read_bytes(), digest_size=6).hexdigest()}"


def save_rates(rates: Rates, directory: Path) -> Path:
    """Save the rates in place of older ones of the same processor, threads and dtype, and return the file."""
    key = hashlib.blake2b(rates.processor.encode(), digest_size=4).hexdigest()
    path = directory / f"rates-{key}-{rates.threads}-{rates.dtype}.json"
    directory.mkdir(parents=True, exist_ok=True)
    save_json(rates, path, "the measured rates")
    return path


def kept_rates(processor: str, directory: Path) -> tuple[Rates, ...]:
    """Return all saved rates of a processor. Unreadable files count as absent: they can be measured again."""
    of_processor = []
    for path in matches(directory, "rates-*.json"):
        try:
            rates = from_plain(Rates, parse_json(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, ValidationError):
            continue
        if rates.processor == processor:
            of_processor.append(rates)
    return tuple(of_processor)
