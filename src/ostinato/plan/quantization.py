"""Quantised weights: which matrices become 8-bit integers, and what they take."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ostinato.plan.weights import Weight

SCALE_BYTES = 4
"""Scales are float32."""


@dataclass(frozen=True)
class Quantization:
    """Weights as 8-bit integers times a scale, one for each row, or for every `group_size` elements of a row, the last
    group being shorter where that does not divide it.

    `ignore` names linears that stay as they are, each by its name or by `re:` and a pattern that its name begins with.
    With `ignores_stacks` experts do that are stacked in the checkpoint.
    """

    group_size: int | None = None
    ignore: tuple[str, ...] = ()
    ignores_stacks: bool = False

    @property
    def name(self) -> str:
        """As the setting has it."""
        return "int8" if self.group_size is None else f"int8_g{self.group_size}"

    @property
    def granularity(self) -> str:
        return "one scale per row" if self.group_size is None else f"one scale per {self.group_size} elements of a row"

    def quantises(self, weight: Weight) -> bool:
        return weight.can_be_quantised and self.covers(weight.linears, weight.is_stack)

    def covers(self, names: Iterable[str], is_stack: bool = False) -> bool:
        """Whether linears that share a weight are quantised: only if none of them is to stay as it is."""
        if is_stack and self.ignores_stacks:
            return False
        return not self.ignore or not any(self._ignores(name) for name in names)

    def num_bytes(self, weight: Weight) -> int:
        """Of a quantised weight with its scales."""
        groups = 1 if self.group_size is None else -(-weight.in_size // self.group_size)
        return weight.out_size * (weight.in_size + SCALE_BYTES * groups)

    def _ignores(self, name: str) -> bool:
        # The backbone of a hybrid has two names among checkpoints.
        spellings = (name, re.sub(r"^model\.", "backbone.", name), re.sub(r"^backbone\.", "model.", name))
        for entry in self.ignore:
            if entry.startswith("re:"):
                if any(re.match(entry.removeprefix("re:"), spelling) for spelling in spellings):
                    return True
            elif entry in spellings:
                return True
        return False
