"""What a process of the server has when it is ready, and keeps until it ends."""

from __future__ import annotations

import gc

_THRESHOLD = 10_000
"""New objects until the collector looks through them. Those of a request live longer than Python's 700 take to come,
and nearly all of them go without it."""


def keep_for_good() -> None:
    """Has the garbage collector pass over all that there is now, and look at the rest seldom.

    What a ready process has is some hundred thousand objects, which no request makes garbage; to look through them
    takes a tenth of a second, for which everybody waits.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_THRESHOLD)
