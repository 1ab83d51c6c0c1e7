"""Facts about the processor from Linux's /proc/cpuinfo."""

from __future__ import annotations

from pathlib import Path


def cpu_model(root: Path = Path("/")) -> str:
    """Return the processor's name; `CPU` if it has none."""
    return _fields_of_first(root).get("model name", "CPU")


def read_cpu_flags(root: Path = Path("/")) -> frozenset[str]:
    """Return the flags of its features; an empty set without such a line, as on ARM."""
    return frozenset(_fields_of_first(root).get("flags", "").split())


def processor_of(root: Path = Path("/")) -> str:
    """Return a processor's name, family and model: a virtual machine may name no more than the maker."""
    fields = _fields_of_first(root)
    if "cpu family" in fields:
        numbers = f"family {fields['cpu family']}, model {fields.get('model', '')}"
    else:
        numbers = " ".join(("part", *(fields[name] for name in ("CPU implementer", "CPU part") if name in fields)))
    return f"{cpu_model(root)} ({numbers})"


def _fields_of_first(root: Path) -> dict[str, str]:
    """Return the lines `name : value` of the first processor; empty if there is no such file."""
    try:
        text = (root / "proc/cpuinfo").read_text()
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.lstrip().partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}
