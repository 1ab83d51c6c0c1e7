"""Which cases of the tests a run has: tests/conftest.py's option `--cases`."""

from __future__ import annotations

from collections.abc import Mapping
from zlib import crc32


def chosen_cases(cases: Mapping[str, bool], choice: str) -> set[str]:
    """Return the names that `choice` selects. `cases` says of each name whether the case is slow.

    A hash of the test's name chooses its one case, so that recipes take turns; a hash of the case's name its share.
    ValueError for another choice.
    """
    if choice == "all":
        return set(cases)
    tests: dict[str, list[str]] = {}
    for name in cases:
        tests.setdefault(name.partition("[")[0], []).append(name)
    drawn = {found[crc32(test.encode()) % len(found)] for test, found in tests.items()}
    one = {name for name in drawn if not cases[name]}
    if choice in ("one", "others"):
        return one if choice == "one" else cases.keys() - one
    share, _, shares = choice.partition("/")
    if not (share.isdecimal() and shares.isdecimal() and 1 <= int(share) <= int(shares)):
        raise ValueError(f"--cases {choice}: all, one, others, or K/N with K from 1 to N")
    return drawn | {name for name in cases if crc32(name.encode()) % int(shares) == int(share) - 1}
