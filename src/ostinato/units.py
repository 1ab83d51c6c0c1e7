"""Sizes of memory as people write them."""

from __future__ import annotations

import math
import re

from ostinato.errors import ConfigError

KiB, MiB, GiB = 2**10, 2**20, 2**30

_UNITS = {
    "": 1, "b": 1,
    "kib": KiB, "mib": MiB, "gib": GiB, "tib": 2**40,
    "k": KiB, "m": MiB, "g": GiB, "t": 2**40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip


def parse_bytes(text: str) -> int:
    """Return the bytes of `40GiB`, `512 MiB`, `1.5g`, `2GB` (decimal) or a plain number; else raise ConfigError."""
    match = re.fullmatch(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(f"{text!r} is not a size; write it like 4GiB, 512MiB or 2GB")
    unit = _UNITS[match[2].lower()]
    count = int(match[1]) * unit if match[1].isdigit() else int(float(match[1]) * unit)
    if not match[2] and 0 < count < KiB:
        raise ConfigError(f"{text!r} would be {count} bytes; did you mean {count}GiB or {count}MiB?")
    return count


_MULTIPLES = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "ki": 2**10, "mi": 2**20, "%": 0.01}
_SECONDS = {"": 1, "ms": 0.001, "s": 1, "sec": 1, "seconds": 1, "m": 60, "min": 60, "minutes": 60, "h": 3600}


def number_in(text: str, *, is_time: bool = False) -> float | None:
    """Return the number that text such as `4k`, `8,192`, `90%` or, for a time, `30s` probably means; None for others.

    It is for messages: settings take plain numbers, since 4k may be 4096 or 4000.
    """
    match = re.fullmatch(r"([+-]?\d[\d,_]*(?:\.\d+)?)\s*([a-z%]*)", text.strip().lower())
    units = _SECONDS if is_time else _MULTIPLES
    if match is None or match[2] not in units:
        return None
    digits = match[1].replace("_", "")
    decimal = re.fullmatch(r"\d+,\d{1,2}", digits)
    number = float(digits.replace(",", "." if decimal else "")) * units[match[2]]
    if math.isinf(number):
        return None
    return int(number) if number == int(number) else number


def read_size(value: object) -> object:
    """Return a setting of bytes: `parse_bytes` reads text, other values stay. ValueError, as pydantic wants it."""
    if not isinstance(value, str):
        return value
    try:
        return parse_bytes(value)
    except ConfigError as error:
        raise ValueError(error.message) from None


def counted(number: int, name: str) -> str:
    """Return number and name, such as `1 round`, `3 rounds`."""
    return f"{number} {name}{'' if number == 1 else 's'}"


def exact_bytes(count: int) -> str:
    """Return a size as one would type it, which `parse_bytes` reads as the very same: `823KiB`, or `842753`."""
    for unit, size in (("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if count and count % size == 0:
            return f"{count // size}{unit}"
    return str(count)


def format_bytes(count: int) -> str:
    """Return a size to read, in binary units, with about three digits: `4 GiB`, `1.25 GiB`, `100 MiB`, `17 B`."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024:
            break
        size, unit = size / 1024, larger
    digits = 0 if size >= 100 or unit == "B" else 1 if size >= 10 else 2
    number = f"{size:.{digits}f}"
    if "." in number:
        number = number.rstrip("0").rstrip(".")
    return f"{number} {unit}"
