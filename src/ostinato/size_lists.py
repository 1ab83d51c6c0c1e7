"""Settings that are lists of sizes: capture sizes, and the budgets of a vision encoder's graphs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ostinato.errors import ConfigError, Remedy

BUDGETS = "encoder_token_budgets"

_EMPTY = {BUDGETS: "the default ones, or set encoder_graph_mode to none"}
_SIZE = {BUDGETS: "a budget is a whole number of tokens, at least 1"}


def checked_sizes(setting: str, given: Any, max_capture_size: Any = None) -> tuple[int, ...]:
    """Return the given sizes in ascending order, each once.

    ConfigError if there are none, one is not a size, or the largest is not `max_capture_size`, where that is given too.
    """
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        message = f"{setting} = {given!r} is not a list of whole numbers"
        raise ConfigError(message, [Remedy(setting, _repaired([given], max_capture_size))])
    values = list(given)
    repair = Remedy(setting, _repaired(values, max_capture_size))
    if not values:
        otherwise = _EMPTY.get(setting, "the default sizes, or set graph_mode to none")
        raise ConfigError(f"{setting} is an empty list; leave it open for {otherwise}", [repair])
    wrong = [repr(value) for value in values if not is_count(value)]
    if wrong:
        what = _SIZE.get(setting, "a capture size is a whole number of at least 1")
        raise ConfigError(f"{setting} has {', '.join(wrong)}: {what}", [repair])
    sizes = ascending(values)
    if max_capture_size is not None and max_capture_size != sizes[-1]:
        message = f"max_capture_size {max_capture_size!r} is not the largest of the given {setting}, {sizes[-1]}"
        remedies = [Remedy("max_capture_size", sizes[-1])]
        raise ConfigError(message, [*remedies, repair] if is_count(max_capture_size) else remedies)
    return sizes


def ascending(sizes: Iterable[int]) -> tuple[int, ...]:
    """Return the sizes in ascending order, each once."""
    return tuple(sorted(set(sizes)))


def is_count(value: Any, least: int = 1) -> bool:
    """Return whether a value is a whole number of at least `least`."""
    # True and False are ints to Python, and mistakes here.
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _repaired(given: Iterable[Any], max_capture_size: Any) -> list[int] | None:
    """Return the nearest legal list; None (open) if no size is left.

    Its largest size is `max_capture_size` where that is given.
    """
    sizes = {value for value in given if is_count(value)}
    if sizes and is_count(max_capture_size):
        sizes = {size for size in sizes if size < max_capture_size} | {max_capture_size}
    return sorted(sizes) or None
