"""Requests to the operating system: address space, matrix units, and spinning threads.

A limit of the address space (`ulimit -v`, RLIMIT_AS) counts what is reserved, not what is used: torch alone reserves
more than half a gigabyte. What fails then says nothing of the limit, and may be any of a dozen errors.

Linux gives the processor's matrix units (AMX) to each process that asks. The tile registers add 8 KiB to the saved
state of a thread, so a process may use them only after it has asked (Linux's Documentation/arch/x86/xstate.rst). The
permission holds for all its threads. A process that it starts must ask anew.

Threads of the kernels spin while they wait for each other, as long as fits the machine or as a user says. The limit of
open files is `ulimit -n` (RLIMIT_NOFILE).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import sys
from collections.abc import Mapping

from ostinato.errors import CapacityError, ConfigError
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
    """Return the error to show for one that follows from the limit; None without a limit or for other causes."""
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


ARCH_PRCTL = 158
"""Number of the system call on x86-64."""
ARCH_REQ_XCOMP_PERM = 0x1023
"""Request code for a component of the processor's state."""
XFEATURE_XTILEDATA = 18
"""The component with the tiles."""


def request_matrix_units() -> str | None:
    """Request the tiles for every thread of this process. Return None if they may be used, else the reason why not."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"{platform.system()} on {platform.machine()} has none"
    system_call = ctypes.CDLL(None, use_errno=True).syscall
    system_call.restype = ctypes.c_long
    arguments = (ctypes.c_long(number) for number in (ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA))
    if system_call(*arguments) == 0:
        return None
    return f"arch_prctl(ARCH_REQ_XCOMP_PERM): {os.strerror(ctypes.get_errno())}"


WAIT_POLICIES = {"active": 2**62, "passive": 0}
"""Turns for each value of `OMP_WAIT_POLICY`."""
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
"""Units of `GOMP_SPINCOUNT`, as libgomp reads them."""


def spin_turns(environment: Mapping[str, str]) -> int:
    """Return how many turns the kernels' threads spin before they sleep, if a user says so; else -1: it adapts.

    The variables are those of libgomp, which torch's own threads read. ConfigError for a value that it would ignore.
    """
    count = environment.get("GOMP_SPINCOUNT", "").strip().lower()
    policy = environment.get("OMP_WAIT_POLICY", "").strip().lower()
    if count in ("infinite", "infinity"):
        return WAIT_POLICIES["active"]
    if count:
        number, unit = (count, "") if count[-1].isdigit() else (count[:-1].rstrip(), count[-1])
        if not (number.isascii() and number.isdigit() and unit in _UNITS):
            raise ConfigError(
                f"GOMP_SPINCOUNT={count!r} should be a number, such as 10000 or 30k, or infinity; without it, threads "
                "spin as long as fits the machine"
            )
        return min(int(number) * _UNITS[unit], WAIT_POLICIES["active"])
    if policy and policy not in WAIT_POLICIES:
        raise ConfigError(
            f"OMP_WAIT_POLICY={policy!r} should be active or passive; without it, threads spin as long as fits the "
            "machine"
        )
    return WAIT_POLICIES.get(policy, -1)


def max_open_files() -> int | None:
    """Return the number of files that this process may have open; None if there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def raise_max_open_files(needed: int) -> int | None:
    """Raise the limit of open files to `needed` if it is lower.

    Return None once `needed` files may be open, else the greatest limit that this process may set, which it leaves as
    it is.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return None
    if hard != resource.RLIM_INFINITY and hard < needed:
        return hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return None


def stderr_is_terminal() -> bool:
    """Return whether stderr is a terminal. A program may have none (`2>&-`), a closed one, or an object of its own."""
    try:
        return bool(sys.stderr.isatty())
    except (AttributeError, ValueError):
        return False


def extra_command(extra: str) -> str:
    """Return the command that installs an extra, also from a checkout or a wheel."""
    return f"pip install 'ostinato[{extra}]' (in a checkout '.[{extra}]', of a wheel 'FILE.whl[{extra}]')"


def missing_torch(need: str) -> ConfigError:
    """Return the error for what needs PyTorch where it is not installed; `need` ends in a verb."""
    return ConfigError(f"{need} PyTorch, which is not installed: {extra_command('torch')}")


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
