"""Traffic: an engine's counts of batches and request lengths, and the capture sizes that they suggest.

Lengths of requests may also come from a user. In a traffic file, counts are objects whose keys are whole numbers as
strings. Both ladders are chosen to pad the batches least, and compared with the planned ones.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

from pydantic import computed_field

from ostinato.errors import ConfigError, Remedy, os_error_text
from ostinato.files import write_text
from ostinato.json_io import JsonObject, parse_json
from ostinato.plan.graphs.capture_plan import CapturePlan
from ostinato.plan.graphs.coverage import FULL_MODES, PIECEWISE_MODES, smallest_holding


def json_object(name: str, data: object) -> JsonObject:
    """Return `data` if it is an object, else raise a ConfigError that names it."""
    if not isinstance(data, dict):
        raise ConfigError(f"{name} = {_short(data)}: it is an object")
    return data


def read_counts(name: str, data: object) -> Counter[int]:
    """Return `{number: times}` from an object whose keys are numbers as strings. ConfigError names a wrong entry."""
    counts: Counter[int] = Counter()
    for key, count in json_object(name, data).items():
        number = read_number(name, key)
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ConfigError(f"{name}.{key} = {_short(count)}: it is how often that was counted, a whole number")
        counts[number] = count
    return counts


def read_number(name: str, key: object) -> int:
    """Return the number that a key of the object `name` represents, or raise a ConfigError."""
    # Only one spelling is accepted, so that no two keys are the same number.
    if not isinstance(key, str) or re.fullmatch("[1-9][0-9]{0,17}", key) is None:
        raise ConfigError(f"{name} has the key {_short(key)}: its keys are whole numbers of at least 1")
    return int(key)


def with_string_keys(counts: Mapping[int, int]) -> dict[str, int]:
    """Return the counts in the form of a file: keys ascending, as strings."""
    return {str(number): count for number, count in sorted(counts.items())}


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


LENGTH_FIELDS = ("prompt_tokens", "output_tokens", "cached_tokens")


@dataclass
class RequestLengths:
    """Counts of request lengths.

    `prompt_tokens` and `output_tokens` are {length: requests}; `cached_tokens` of all prompts' tokens were found in the
    prefix cache.
    """

    prompt_tokens: Counter[int] = field(default_factory=Counter)
    output_tokens: Counter[int] = field(default_factory=Counter)
    cached_tokens: int = 0

    def count(self, prompt_tokens: int, output_tokens: int, cached_tokens: int) -> None:
        """Add a request that has ended. One without output is not counted: it was aborted in its prompt."""
        if output_tokens:
            self.prompt_tokens[prompt_tokens] += 1
            self.output_tokens[output_tokens] += 1
            self.cached_tokens += cached_tokens

    @property
    def num_requests(self) -> int:
        return self.output_tokens.total()

    @property
    def mean_prompt(self) -> float:
        return mean(self.prompt_tokens)

    @property
    def mean_output(self) -> float:
        return mean(self.output_tokens)

    @property
    def output_beside(self) -> float:
        """Mean length of the outputs that are being computed at a moment: E[n^2] / E[n].

        Long outputs are in more steps, so each counts as often as it has tokens.
        """
        squares = sum(length * length * count for length, count in self.output_tokens.items())
        return squares / sum(length * count for length, count in self.output_tokens.items())

    @property
    def cached_share(self) -> float:
        """Share of the prompts' tokens that need not be computed."""
        return self.cached_tokens / sum(length * count for length, count in self.prompt_tokens.items())

    def to_json(self) -> JsonObject:
        """Return the counts as plain data, keys ascending, as strings.

        The form is `{"prompt_tokens": {length: requests}, "output_tokens": {length: requests}, "cached_tokens": n}`.
        """
        return {
            "prompt_tokens": with_string_keys(self.prompt_tokens),
            "output_tokens": with_string_keys(self.output_tokens),
            "cached_tokens": self.cached_tokens,
        }

    @classmethod
    def from_json(cls, data: object) -> RequestLengths:
        """Return the counts from the result of `to_json`; `cached_tokens` may be missing.

        ConfigError that names the field if the data has another form, or contains no request.
        """
        fields = json_object("requests", data)
        if not {"prompt_tokens", "output_tokens"} <= fields.keys() <= set(LENGTH_FIELDS):
            names = ", ".join(repr(name) for name in fields) or "nothing"
            raise ConfigError(
                f"requests has {names}; its fields are {', '.join(LENGTH_FIELDS)}, the last one if you like"
            )
        prompts, outputs = (read_counts(f"requests.{name}", fields[name]) for name in LENGTH_FIELDS[:2])
        for name, counts in (("prompt_tokens", prompts), ("output_tokens", outputs)):
            if not counts.total():
                raise ConfigError(f'requests.{name} counts no request; write {{"128": 1}} for prompts of 128 tokens')
        cached, most = fields.get("cached_tokens", 0), sum(length * count for length, count in prompts.items())
        if not isinstance(cached, int) or isinstance(cached, bool) or not 0 <= cached <= most:
            raise ConfigError(f"requests.cached_tokens = {cached!r}: it is at most what all prompts have, {most:,}")
        return cls(prompts, outputs, cached)


def mean(counts: Counter[int]) -> float:
    """Return the mean of the keys, each weighted by its count; NaN without any."""
    return sum(value * count for value, count in counts.items()) / counts.total() if counts.total() else math.nan


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

    def to_json(self) -> JsonObject:
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
    def from_json(cls, data: object) -> Traffic:
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

    def save(self, path: str | Path) -> None:
        """Write the traffic as JSON. RequestError if the file cannot be written."""
        write_text(path, json.dumps(self.to_json(), indent=2) + "\n", "the traffic")

    @classmethod
    def load(cls, path: Path) -> Traffic:
        """Read a file that `save` wrote. ConfigError if there is no such file, or it is not one of traffic."""
        try:
            data = parse_json(path.read_text(encoding="utf-8"))
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


@dataclass(frozen=True)
class LadderOutcome:
    """Outcome of a ladder for counted steps.

    `replayed` steps have `padding` tokens of padding in all; `eager` steps are larger than all sizes.
    """

    sizes: tuple[int, ...]
    replayed: int
    eager: int
    padding: int

    @computed_field  # type: ignore[prop-decorator]
    @property
    def mean_padding(self) -> float:
        """Expected tokens of padding of one replayed step."""
        return self.padding / self.replayed if self.replayed else 0.0


@dataclass(frozen=True)
class LadderChoice:
    """The planned ladder and the chosen one, which is the planned one if the traffic has no such steps."""

    planned: LadderOutcome
    chosen: LadderOutcome


@dataclass(frozen=True)
class Sizing:
    """Choices for each ladder that the graph mode has; None for a ladder that it does not have."""

    tokens: LadderChoice | None
    rows: LadderChoice | None

    def choices(self) -> Iterator[tuple[str, LadderChoice]]:
        if self.tokens is not None:
            yield "tokens", self.tokens
        if self.rows is not None:
            yield "rows", self.rows

    @computed_field  # type: ignore[prop-decorator]
    @property
    def flags(self) -> list[str]:
        """Flags for the chosen sizes, of all ladders, since an open one would follow from the others."""
        names = {"tokens": "--capture-sizes", "rows": "--capture-rows"}
        return [
            f"{names[name]} {','.join(map(str, choice.chosen.sizes))}"
            for name, choice in self.choices()
            if choice.chosen.sizes
        ]


def size_for_traffic(
    traffic: Traffic, capture: CapturePlan, *, max_num_seqs: int, max_num_batched_tokens: int, num_sizes: int | None
) -> Sizing:
    """Return the `num_sizes` best sizes of each ladder for such traffic, by default as many as are planned.

    In a mode with full graphs a uniform decode step takes one of them, else it counts as a step of tokens. ConfigError
    if the mode has no graphs, or `num_sizes` is less than 1.
    """
    mode = capture.graph_mode
    if mode == "none":
        message = "graph_mode none captures nothing, so there are no sizes to choose from traffic"
        changes = (change for entry in capture.uncovered for change in entry.changes)
        raise ConfigError(message, [change for change in changes if change.setting == "graph_mode"][:1])
    rows = tokens = None
    by_tokens = Counter(traffic.mixed)
    if mode in FULL_MODES:
        by_rows = traffic.decode
        chosen = _chosen(traffic.row_weights(), capture.rows, num_sizes, max_num_seqs)
        rows = LadderChoice(_row_outcome(by_rows, capture.rows), _row_outcome(by_rows, chosen))
    else:
        for tokens_per_row, counts in traffic.decode.items():
            by_tokens.update({count * tokens_per_row: steps for count, steps in counts.items()})
    if mode in PIECEWISE_MODES:
        chosen = _chosen(by_tokens, capture.tokens, num_sizes, max_num_batched_tokens)
        tokens = LadderChoice(_token_outcome(by_tokens, capture.tokens), _token_outcome(by_tokens, chosen))
    return Sizing(tokens, rows)


def _chosen(
    counts: Mapping[int, int], planned: tuple[int, ...], num_sizes: int | None, largest: int
) -> tuple[int, ...]:
    return choose_sizes(counts, max(1, len(planned)) if num_sizes is None else num_sizes, largest) or planned


def _token_outcome(counts: Mapping[int, int], sizes: tuple[int, ...]) -> LadderOutcome:
    padding = expected_padding(counts, sizes)
    return LadderOutcome(sizes, padding.covered, padding.uncovered, padding.padding)


def _row_outcome(decode: Mapping[int, Mapping[int, int]], sizes: tuple[int, ...]) -> LadderOutcome:
    """Return the outcome of a row ladder. A row of padding counts as many tokens as a row has."""
    found = [(tokens_per_row, expected_padding(counts, sizes)) for tokens_per_row, counts in decode.items()]
    return LadderOutcome(
        sizes,
        sum(padding.covered for _, padding in found),
        sum(padding.uncovered for _, padding in found),
        sum(padding.padding * tokens_per_row for tokens_per_row, padding in found),
    )
