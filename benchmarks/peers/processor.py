"""The kind of processor that a record is of: one name for all machines whose kernels run alike."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from ostinato.plan.device.linux import processor_of, read_cpu_flags

ZEN = {23: "Zen 2", 25: "Zen 3", 26: "Zen 5"}
"""By AMD's family, where its model does not say more."""
ZEN_4 = (range(0x10, 0x20), range(0x60, 0x80), range(0xA0, 0xB0))
"""Models of family 25 (Linux, arch/x86/kernel/cpu/amd.c)."""


@dataclass(frozen=True)
class Processor:
    name: str
    """As the machine says it, with family and model."""
    kind: str

    @property
    def folder(self) -> str:
        """A file name for the kind: `amd-zen-4`."""
        return re.sub(r"[^a-z0-9]+", "-", self.kind.lower()).strip("-")


def processor_here(root: Path = Path("/")) -> Processor:
    """This machine's."""
    name = processor_of(root)
    return Processor(name, kind_of(name, read_cpu_flags(root)))


def kind_of(name: str, flags: Collection[str]) -> str:
    """Of a processor called `name` (see `processor_of`): AMD's by generation, Intel's by the instructions that decide
    how fast products are, any other by its name."""
    numbers = re.search(r"family (\d+), model (\d+)", name)
    if numbers is None:
        return name
    family, model = int(numbers[1]), int(numbers[2])
    if name.startswith("AMD") and family in ZEN:
        is_zen_4 = family == 25 and any(model in models for models in ZEN_4)
        return f"AMD {'Zen 4' if is_zen_4 else ZEN[family]}"
    if name.startswith("Intel"):
        for flag, said in (("amx_tile", "AMX"), ("avx512_bf16", "AVX512-BF16"), ("avx512f", "AVX-512")):
            if flag in flags:
                return f"Intel with {said}"
    return name
