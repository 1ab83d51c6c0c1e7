"""The limit of the process's address space (`ulimit -v`, RLIMIT_AS), and the errors that follow from it.

Such a limit counts what is reserved, not what is used: torch alone reserves more than half a gigabyte. What fails then
says nothing of the limit, and may be any of a dozen errors.
"""

from __future__ import annotations

import errno
import resource

from ostinato.errors import CapacityError
from ostinato.units import format_bytes

_SAID = (
    "failed to map segment",
    "cannot allocate memory",
    "can't allocate memory",
    "can't start new thread",
    "bad_alloc",
)
"""Parts of messages of the library loader, of torch and of Python."""


def address_space_limit() -> int | None:
    """Return the limit in bytes; None if there is none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def address_space_hint() -> str | None:
    """Return a hint about the limit, for an error that may follow from it; None if there is no limit."""
    limit = address_space_limit()
    if limit is None:
        return None
    return (
        f"the process may have {format_bytes(limit)} of address space (ulimit -v), which counts all that is reserved; "
        "lift it by `ulimit -v unlimited`, and bound memory by a cgroup, which the plan takes into account; or set "
        "cache_memory to less"
    )


def lack_of_address_space(error: BaseException) -> CapacityError | None:
    """Return the error to show for one that follows from the limit.

    None if there is no limit, or the error has another cause.
    """
    hint = address_space_hint()
    if hint is None:
        return None
    seen: BaseException | None = error
    while seen is not None:
        if _is_lack(seen):
            return CapacityError(f"there was no room for more: {hint}")
        seen = seen.__cause__ or seen.__context__
    return None


def _is_lack(error: BaseException) -> bool:
    # A library whose own reservation failed may have nothing better to say than SystemError.
    if isinstance(error, MemoryError | SystemError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return isinstance(error, ImportError | RuntimeError) and any(said in str(error).lower() for said in _SAID)
