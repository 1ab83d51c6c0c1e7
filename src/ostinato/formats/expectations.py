"""What the readers of quantisation configs share: values that are expected, and linears that stay as they are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ostinato.errors import ModelError

GROUP_SIZES = (32, 64, 128)
"""Of 4-bit weights, those that kernels read."""


@dataclass(frozen=True)
class Expectations:
    """A quantisation config, and what is `supported` of its method."""

    given: Mapping[str, Any]
    supported: str

    def expect(self, name: str, *values: Any, inside: Mapping[str, Any] | None = None, default: Any = None) -> Any:
        """The value of `name`, which is to be one of `values`; of `True` and 1 only the one that is meant."""
        value = (self.given if inside is None else inside).get(name, default)
        if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in values):
            raise self.unsupported(name, value)
        return value

    def refuse(self, *names: str) -> None:
        """Values that would mean something else, if they are there."""
        for name in names:
            if self.given.get(name):
                raise self.unsupported(name, self.given[name])

    def unsupported(self, name: str, value: Any) -> ModelError:
        return ModelError(f"the checkpoint is quantized with {name} = {value!r}; {self.supported}")

    def names(self, *spellings: str) -> tuple[str, ...]:
        """The linears that a list names, as `Quantization.ignore` has them: an entry is a part of a module's name
        between dots, or a pattern for one."""
        found: list[str] = []
        for name in spellings:
            entries = self.given.get(name) or []
            if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
                raise self.unsupported(name, entries)
            found += [rf"re:(?:.*\.)?(?:{checked_pattern(name, entry)})(?:\.|$)" for entry in entries]
        return tuple(found)


def checked_pattern(name: str, pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ModelError(f"quantization_config has {name} = {pattern!r}, which is no pattern: {error}") from None
    return pattern
