"""Traffic: an engine's counts of its batches and requests; and the capture sizes that would pad the batches least."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from ostinato.errors import ConfigError, Remedy, os_error_text
from ostinato.plan.counts_json import json_object, read_counts, read_number, with_string_keys
from ostinato.plan.graphs.coverage import smallest_holding
from ostinato.plan.layouts.requests import RequestLengths

FIELDS = ("decode", "mixed", "requests")


@dataclass
class Traffic:
    """Counts of steps by shape, and of requests by length.

    `decode[tokens_per_row][rows]` counts uniform decode, `mixed[tokens]` other steps. `requests` has the lengths of the
    requests that have ended, None if they were not counted.
    """

    decode: dict[int, Counter[int]] = field(default_factory=dict)
    mixed: Counter[int] = field(default_factory=Counter)
    requests: RequestLengths | None = None

    @property
    def has_steps(self) -> bool:
        return bool(self.decode or self.mixed)

    def count(self, rows: int, tokens_per_row: int | None, tokens: int, steps: int = 1) -> None:
        """Add steps of one shape. `tokens_per_row` is None for a mixed batch, as for `dispatch`."""
        if tokens_per_row is None:
            self.mixed[tokens] += steps
        else:
            self.decode.setdefault(tokens_per_row, Counter())[rows] += steps

    def row_weights(self) -> Counter[int]:
        """Return `{rows: tokens}` that one more row would have cost.

        These are the weights for one row ladder that serves every number of tokens per row, so that its padding is in
        tokens.
        """
        weights: Counter[int] = Counter()
        for tokens_per_row, counts in self.decode.items():
            for rows, count in counts.items():
                weights[rows] += tokens_per_row * count
        return weights

    def to_json(self) -> dict[str, Any]:
        """Return the counts as plain data, keys ascending, as strings.

        The form is `{"decode": {tokens_per_row: {rows: count}}, "mixed": {tokens: count}}`, and `"requests"`, if they
        were counted.
        """
        steps = {
            "decode": {str(size): with_string_keys(counts) for size, counts in sorted(self.decode.items())},
            "mixed": with_string_keys(self.mixed),
        }
        return steps if self.requests is None else {**steps, "requests": self.requests.to_json()}

    @classmethod
    def from_json(cls, data: Any) -> Traffic:
        """Return the traffic from the result of `to_json`, or from its requests alone.

        ConfigError that names the field if the data has another form.
        """
        fields = json_object("traffic", data)
        if not (fields.keys() == {"requests"} or {"decode", "mixed"} <= fields.keys() <= set(FIELDS)):
            names = ", ".join(repr(name) for name in fields) or "nothing"
            raise ConfigError(f"traffic has {names}; its fields are decode and mixed, requests, or all three")
        decode = {
            read_number("decode", key): read_counts(f"decode.{key}", counts)
            for key, counts in json_object("decode", fields.get("decode", {})).items()
        }
        requests = RequestLengths.from_json(fields["requests"]) if "requests" in fields else None
        return cls(decode, read_counts("mixed", fields.get("mixed", {})), requests)

    def save(self, path: Path) -> None:
        """Write the traffic as JSON."""
        path.write_text(json.dumps(self.to_json(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Traffic:
        """Read a file that `save` wrote. ConfigError if there is no such file, or it is not one of traffic."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"traffic file {path} cannot be read: {os_error_text(error)}") from None
        try:
            return cls.from_json(data)
        except ConfigError as error:
            raise ConfigError(f"traffic file {path}: {error.message}") from None


@dataclass(frozen=True)
class LadderPadding:
    """Outcome of a ladder for counted batches.

    `covered` and `uncovered` are numbers of batches; `padding` is that of all covered ones together, in the unit of
    their sizes.
    """

    covered: int
    uncovered: int
    padding: int

    @property
    def mean(self) -> float:
        """Expected padding of one covered batch; 0 if there are none."""
        return self.padding / self.covered if self.covered else 0.0


def expected_padding(counts: Mapping[int, int], ladder: Sequence[int]) -> LadderPadding:
    """Return the padding of batches, as `{size: count}`, if each takes the smallest size of the ladder that holds it.

    The ladder is ascending. Batches above its largest size run eagerly and are not padded.
    """
    covered = uncovered = padding = 0
    for size, count in counts.items():
        captured = smallest_holding(ladder, size)
        if captured is None:
            uncovered += count
        else:
            covered += count
            padding += (captured - size) * count
    return LadderPadding(covered, uncovered, padding)


def choose_sizes(counts: Mapping[int, int], num_sizes: int, largest: int | None = None) -> tuple[int, ...]:
    """Return the `num_sizes` sizes, none above `largest`, that cover most batches, with the least padding in all.

    `counts` is `{size: count}`. The result is ascending; it is shorter if fewer sizes occur. It is exact, by dynamic
    programming over the sizes that occur, since a size that does not occur could be lowered to the next one that does.
    The last size is the largest that occurs, so all that can be covered is. ConfigError if `num_sizes` is less than 1.
    """
    if num_sizes < 1:
        raise ConfigError(f"num_sizes = {num_sizes}: at least one size is chosen", [Remedy("num_sizes", 1)])
    sizes = sorted(size for size, count in counts.items() if count > 0 and (largest is None or size <= largest))
    if len(sizes) <= num_sizes:
        return tuple(sizes)
    batches = [0, *accumulate(counts[size] for size in sizes)]
    units = [0, *accumulate(size * counts[size] for size in sizes)]

    def padding(first: int, end: int) -> int:
        """Return the padding of the batches of sizes[first:end], all padded to the last of these sizes."""
        return sizes[end - 1] * (batches[end] - batches[first]) - (units[end] - units[first])

    # least[end]: the least padding of sizes[:end] with one size chosen per round so far, the last being sizes[end - 1];
    # cuts: for each further round, the start of the batches that the last size serves.
    least = [0, *(padding(0, end) for end in range(1, len(sizes) + 1))]
    cuts: list[list[int]] = []
    for chosen in range(1, num_sizes):
        least, cut = _with_one_more(least, padding, chosen)
        cuts.append(cut)
    ends = [len(sizes)]
    for cut in reversed(cuts):
        ends.append(cut[ends[-1]])
    return tuple(sizes[end - 1] for end in reversed(ends))


def _with_one_more(least: list[int], padding: Callable[[int, int], int], chosen: int) -> tuple[list[int], list[int]]:
    """Return (least padding, cut) by end, with one size more than the `chosen` ones of `least`.

    Since a <= b <= c <= d gives padding(a, c) + padding(b, d) <= padding(a, d) + padding(b, c), the best cut moves only
    up with the end (Yao, 1980, on quadrangle inequalities). So the best cut of the middle end bounds those of all ends
    on either side, and a round takes n log n steps, not n squared.
    """
    last_end = len(least) - 1
    total, cuts = [0] * len(least), [0] * len(least)
    open_ends = [(chosen + 1, last_end, chosen, last_end - 1)]
    while open_ends:
        first, last, low, high = open_ends.pop()
        if first > last:
            continue
        end = (first + last) // 2
        total[end], cuts[end] = min((least[cut] + padding(cut, end), cut) for cut in range(low, min(high, end - 1) + 1))
        open_ends += [(first, end - 1, low, cuts[end]), (end + 1, last, cuts[end], high)]
    return total, cuts
