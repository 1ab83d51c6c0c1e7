"""Child processes of this one: their environment, and their end together with the parent, however that ends."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Protocol

SECRET_VARIABLES = {"api_key": "OSTINATO_API_KEY", "ssl_keyfile_password": "OSTINATO_SSL_KEYFILE_PASSWORD"}
"""Setting -> an environment variable that is for the server alone: its processes do not get it."""


def child_environment() -> dict[str, str]:
    """Return the environment of a process that belongs to this one: the same module paths, and no secrets."""
    secrets = SECRET_VARIABLES.values()
    environment = {name: value for name, value in os.environ.items() if name not in secrets}
    return {**environment, "PYTHONPATH": os.pathsep.join(each or os.getcwd() for each in sys.path)}


_SET_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


class _HasDescriptor(Protocol):
    def fileno(self) -> int: ...


def exit_with_peer(connection: _HasDescriptor, patience: Callable[[], float] = lambda: 0.0) -> None:
    """End this process when the other end of a socket is gone, whatever the process is doing.

    It ends at once, or `patience` seconds later, by when it should have ended by itself. A stopped process ends when it
    is continued.
    """

    def watch() -> None:
        poll = select.poll()
        poll.register(connection.fileno(), 0)  # reports only that the connection ended
        poll.poll()
        time.sleep(patience())
        os._exit(0)

    threading.Thread(target=watch, name="the other end", daemon=True).start()


def die_with_parent() -> None:
    """Have the kernel kill this process, started by `start_bound_process`, when its starter ends.

    It is killed even while it is stopped. Only Linux does this, and a starter that ended before this call is not
    noticed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_SIGNAL, signal.SIGKILL)


def start_bound_process(
    command: Sequence[str], env: Mapping[str, str], pass_fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a process without input, in a new session. OSError if that is not possible.

    For Linux the starter of a process is a thread, so a thread starts it that lives as long as it does.
    """
    started: Future[subprocess.Popen[bytes]] = Future()

    def keep() -> None:
        try:
            process = subprocess.Popen(
                command, pass_fds=pass_fds, stdin=subprocess.DEVNULL, env=env, start_new_session=True
            )
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(process)
        with suppress(ChildProcessError):  # another thread has collected its status already
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    threading.Thread(target=keep, name="starter", daemon=True).start()
    try:
        return started.result()
    except KeyboardInterrupt:
        # No caller learns of the process, and it may be stopped, and so not notice that its starter is gone.
        started.add_done_callback(_kill)
        raise


def _kill(started: Future[subprocess.Popen[bytes]]) -> None:
    if started.exception() is None:
        started.result().kill()
