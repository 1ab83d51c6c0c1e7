"""Facts from Linux's /proc and /sys: the processor, and the limits of this process's cgroups (version 1 and 2).

No limit is None.
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Iterator
from pathlib import Path

AT_HWCAP, AT_HWCAP2 = 16, 26

HWCAP = {
    **{name: (AT_HWCAP, bit) for name, bit in {"asimd": 1, "atomics": 8, "asimdrdm": 12, "asimddp": 20}.items()},
    **{name: (AT_HWCAP2, bit) for name, bit in {"i8mm": 13, "bf16": 14}.items()},
}
"""Feature of an ARM CPU -> the entry of the auxiliary vector and the bit that Linux gives it (asm/hwcap.h)."""


def memory_limit(root: Path = Path("/")) -> int | None:
    """Return the bytes of memory that the process may use: the minimum of its cgroup and all those above it."""
    values = [
        *(_number(path / "memory.max") for path in _unified(root)),
        *(_number(path / "memory.limit_in_bytes") for path in _controller(root, "memory")),
    ]
    return min((int(value) for value in values if value is not None), default=None)


def core_limit(root: Path = Path("/")) -> int | None:
    """Return the number of cores that the process's CPU quota is worth, rounded up."""
    quotas = [
        *(_quota(path / "cpu.max") for path in _unified(root)),
        *(_quota(path / "cpu.cfs_quota_us", path / "cpu.cfs_period_us") for path in _controller(root, "cpu")),
    ]
    return min((max(1, -int(-quota // 1)) for quota in quotas if quota is not None), default=None)


def _unified(root: Path) -> Iterator[Path]:
    """Yield the directories of the version 2 hierarchy, from the process's own upwards.

    In a container the path that /proc names may be outside the mount, whose top is then the container's group.
    """
    for line in read_lines(root / "proc/self/cgroup"):
        if line.startswith("0::"):
            yield from _upwards(root / "sys/fs/cgroup", line[3:])
            yield from _upwards(root / "sys/fs/cgroup/unified", line[3:])


def _controller(root: Path, controller: str) -> Iterator[Path]:
    """Yield the directories of a version 1 controller, from the process's own upwards."""
    for line in read_lines(root / "proc/self/cgroup"):
        names, _, path = line.partition(":")[2].partition(":")
        if controller in names.split(","):
            for mount in dict.fromkeys((controller, names)):
                yield from _upwards(root / "sys/fs/cgroup" / mount, path)


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    directory = mount / path.strip("/")
    while directory != mount:
        yield directory
        directory = directory.parent
    yield mount


def _number(path: Path) -> int | None:
    """Return the number in a file; None for `max`, for version 1's nearly 2**63, and without a file."""
    text = " ".join(read_lines(path))
    value = int(text) if text.isdigit() else None
    return value if value is not None and value < 2**60 else None


def _quota(path: Path, period_path: Path | None = None) -> float | None:
    """Return the quota in cores: `quota period` in version 2's file; two files in version 1, -1 for none."""
    words = " ".join(read_lines(path) + (read_lines(period_path) if period_path else [])).split()
    if len(words) != 2 or not all(word.isdigit() for word in words):
        return None
    return int(words[0]) / int(words[1])


def read_lines(path: Path) -> list[str]:
    """Return a file's lines; none if it cannot be read."""
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def cpu_model(root: Path = Path("/")) -> str:
    """Return the processor's name; `CPU` if it has none."""
    return _fields_of_first(root).get("model name", "CPU")


def read_cpu_flags(root: Path = Path("/"), machine: str = platform.machine()) -> frozenset[str]:
    """Return the CPU's flags and its maker (`GenuineIntel`) as /proc/cpuinfo spells them; an empty set if it is silent.

    On ARM they are those of HWCAP in this process's auxiliary vector, where an emulator describes the CPU that it
    emulates; its /proc/cpuinfo is that of the machine below.
    """
    if machine != "aarch64":
        fields = _fields_of_first(root)
        return frozenset((*fields.get("flags", "").split(), *fields.get("vendor_id", "").split()))
    try:
        vector = (root / "proc/self/auxv").read_bytes()
    except OSError:
        return frozenset()
    values = dict(struct.iter_unpack("<QQ", vector[: len(vector) // 16 * 16]))
    return frozenset(name for name, (entry, bit) in HWCAP.items() if values.get(entry, 0) >> bit & 1)


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
    text = "\n".join(read_lines(root / "proc/cpuinfo"))
    lines = (line.partition(":") for line in text.lstrip().partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}
