"""The parts of an export, collected and numbered."""

from __future__ import annotations

import numpy as np


class ByteParts:
    """Bytes that follow an export's head, each identified by its number."""

    def __init__(self) -> None:
        self.parts: list[memoryview] = []
        self._numbers: dict[int, int] = {}

    def add(self, part: memoryview) -> int:
        """Add a part and return its number."""
        self.parts.append(part.cast("B"))
        return len(self.parts) - 1

    def add_once(self, part: memoryview) -> int:
        """Add a part unless it is there, and return its number. `part` must live as long as these parts."""
        if id(part) not in self._numbers:
            self._numbers[id(part)] = self.add(part)
        return self._numbers[id(part)]

    def add_array(self, array: np.ndarray) -> int:
        return self.add(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
