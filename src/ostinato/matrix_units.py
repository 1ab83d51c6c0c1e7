"""Permission to use the processor's matrix units (AMX), which Linux gives to each process that asks.

A thread's tile registers take 8 KiB of room when it is put aside, so a process has them only once it has asked
(Linux's Documentation/arch/x86/xstate.rst). All its threads have them then. A process that it starts must ask anew.
"""

from __future__ import annotations

import ctypes
import os
import platform

ARCH_PRCTL = 158
"""The number of the system call on x86-64."""
ARCH_REQ_XCOMP_PERM = 0x1023
"""Its request for a part of the processor's state."""
XFEATURE_XTILEDATA = 18
"""That part: the tiles."""


def request_matrix_units() -> str | None:
    """Asks for the tiles. None: they may be used, by every thread of this process; else why not."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"{platform.system()} on {platform.machine()} has none"
    system_call = ctypes.CDLL(None, use_errno=True).syscall
    system_call.restype = ctypes.c_long
    arguments = (ctypes.c_long(number) for number in (ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA))
    if system_call(*arguments) == 0:
        return None
    return f"arch_prctl(ARCH_REQ_XCOMP_PERM): {os.strerror(ctypes.get_errno())}"
