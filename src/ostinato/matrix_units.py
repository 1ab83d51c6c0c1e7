"""Permission to use the processor's matrix units (AMX), which Linux gives to each process that asks.

The tile registers add 8 KiB to the saved state of a thread, so a process may use them only after it has asked (Linux's
Documentation/arch/x86/xstate.rst). The permission holds for all its threads. A process that it starts must ask anew.
"""

from __future__ import annotations

import ctypes
import os
import platform

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
