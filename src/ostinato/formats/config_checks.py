"""Helpers of the readers of quantisation configs: expected values, and linears that are not quantised."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ostinato.errors import ModelError
from ostinato.json_io import JsonMapping

GROUP_SIZES = (32, 64, 128)
"""Group sizes of 4-bit weights that kernels read."""


@dataclass(frozen=True)
class ConfigChecker:
    """A quantisation config, and the `supported` part of its method."""

    given: JsonMapping
    supported: str

    def expect(
        self, name: str, *values: object, inside: Mapping[str, object] | None = None, default: object = None
    ) -> Any:
        """Return the value of `name`, which must be one of `values`; `True` and 1 are different values."""
        value = (self.given if inside is None else inside).get(name, default)
        if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in values):
            raise self.unsupported(name, value)
        return value

    def refuse(self, *names: str) -> None:
        """Raise ModelError if one of `names` has a value, which would change the meaning of the weights."""
        for name in names:
            if self.given.get(name):
                raise self.unsupported(name, self.given[name])

    def unsupported(self, name: str, value: object) -> ModelError:
        return ModelError(f"the checkpoint is quantized with {name} = {value!r}; {self.supported}")

    def names(self, *spellings: str) -> tuple[str, ...]:
        """Return the linears that a list names, as patterns for `Quantization.ignore`.

        An entry of the list is a part of a module's name between dots, or a pattern for one.
        """
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
