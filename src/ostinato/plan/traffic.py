"""Ladders from traffic: a histogram of the batches that an engine ran, and the sizes that would pad them least."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from ostinato.errors import ConfigError, Remedy
from ostinato.plan.coverage import smallest_holding


@dataclass
class Traffic:
    """How many steps had which shape: `decode[tokens_per_row][rows]` of uniform decode, `mixed[tokens]` of all others."""

    decode: dict[int, Counter[int]] = field(default_factory=dict)
    mixed: Counter[int] = field(default_factory=Counter)

    def count(self, rows: int, tokens_per_row: int | None, tokens: int) -> None:
        """Adds one step. `tokens_per_row` is None for a mixed batch, as for `dispatch`."""
        if tokens_per_row is None:
            self.mixed[tokens] += 1
        else:
            self.decode.setdefault(tokens_per_row, Counter())[rows] += 1

    def row_weights(self) -> Counter[int]:
        """`{rows: tokens}` that a row more would have cost: the counts for one row ladder that serves every number of
        tokens per row, so that its padding is in tokens."""
        weights: Counter[int] = Counter()
        for tokens_per_row, counts in self.decode.items():
            for rows, count in counts.items():
                weights[rows] += tokens_per_row * count
        return weights

    def to_json(self) -> dict[str, Any]:
        """`{"decode": {tokens_per_row: {rows: count}}, "mixed": {tokens: count}}`, its keys ascending, as strings."""
        return {
            "decode": {str(size): _with_string_keys(counts) for size, counts in sorted(self.decode.items())},
            "mixed": _with_string_keys(self.mixed),
        }

    @classmethod
    def from_json(cls, data: Any) -> Traffic:
        """The traffic that `to_json` gave. ConfigError that names the field if the data has another form."""
        fields = _object("traffic", data)
        if fields.keys() != {"decode", "mixed"}:
            names = ", ".join(repr(name) for name in fields) or "nothing"
            raise ConfigError(f"traffic has {names}; its fields are decode and mixed")
        decode = {
            _shape("decode", key): _counts(f"decode.{key}", counts)
            for key, counts in _object("decode", fields["decode"]).items()
        }
        return cls(decode, _counts("mixed", fields["mixed"]))

    def save(self, path: Path) -> None:
        """Writes the traffic as JSON."""
        path.write_text(json.dumps(self.to_json(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Traffic:
        """Reads what `save` wrote. ConfigError if there is no such file, or it is not one of traffic."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"traffic file {path} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise ConfigError(f"traffic file {path} is not JSON: {error}") from None
        try:
            return cls.from_json(data)
        except ConfigError as error:
            raise ConfigError(f"traffic file {path}: {error.message}") from None


@dataclass(frozen=True)
class Padding:
    """What a ladder makes of counted batches: `covered` and `uncovered` of them, and the `padding` of all covered ones
    together, in the unit of their sizes."""

    covered: int
    uncovered: int
    padding: int

    @property
    def mean(self) -> float:
        """Padding of one covered batch, expected; 0 if there are none."""
        return self.padding / self.covered if self.covered else 0.0


def expected_padding(counts: Mapping[int, int], ladder: tuple[int, ...]) -> Padding:
    """The padding of batches, as `{size: count}`, where each takes the smallest size of `ladder` (ascending) that holds
    it; those above the largest run eagerly and are not padded."""
    covered = uncovered = padding = 0
    for size, count in counts.items():
        captured = smallest_holding(ladder, size)
        if captured is None:
            uncovered += count
        else:
            covered += count
            padding += (captured - size) * count
    return Padding(covered, uncovered, padding)


def choose_sizes(counts: Mapping[int, int], num_sizes: int, largest: int | None = None) -> tuple[int, ...]:
    """The `num_sizes` sizes, at most `largest`, that cover the most of the counted batches, as `{size: count}`, and of
    those the ones with the least padding in all. Ascending; fewer if fewer sizes occur.

    Exact, by dynamic programming over the sizes that occur: lowering any other size to the next of them pads less. To
    cover all that can be, the last size is the largest that occurs. ConfigError if `num_sizes` is less than 1.
    """
    if num_sizes < 1:
        raise ConfigError(f"num_sizes = {num_sizes}: at least one size is chosen", [Remedy("num_sizes", 1)])
    sizes = sorted(size for size, count in counts.items() if count > 0 and (largest is None or size <= largest))
    if len(sizes) <= num_sizes:
        return tuple(sizes)
    batches = [0, *accumulate(counts[size] for size in sizes)]
    units = [0, *accumulate(size * counts[size] for size in sizes)]

    def padding(first: int, end: int) -> int:
        """Of the batches of sizes[first:end], all padded to the last of these sizes."""
        return sizes[end - 1] * (batches[end] - batches[first]) - (units[end] - units[first])

    # least[end]: the padding of sizes[:end] with as many captured sizes as there were rounds, the last being
    # sizes[end - 1]. cuts holds, for each further round, where the sizes that its last one serves begin.
    least = [0, *(padding(0, end) for end in range(1, len(sizes) + 1))]
    cuts: list[list[int]] = []
    for round_ in range(1, num_sizes):
        least, cut = _one_size_more(least, padding, round_)
        cuts.append(cut)
    chosen, end = [], len(sizes)
    for cut in reversed(cuts):
        chosen.append(sizes[end - 1])
        end = cut[end]
    chosen.append(sizes[end - 1])
    return tuple(reversed(chosen))
