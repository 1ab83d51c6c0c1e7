"""Child processes of this one: their environment, and their end together with the parent, however that ends."""

from __future__ import annotations

import ctypes
import os
import pickle
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol, TypeVar, cast

T = TypeVar("T")

SECRET_VARIABLES = {
    "api_key": "OSTINATO_API_KEY",
    "backend_key": "OSTINATO_BACKEND_KEY",
    "ssl_keyfile_password": "OSTINATO_SSL_KEYFILE_PASSWORD",
}
"""Setting -> an environment variable that is for the server alone: its processes do not get it."""


def child_environment() -> dict[str, str]:
    """Return the environment of a process that belongs to this one: the same module paths, and no secrets."""
    secrets = SECRET_VARIABLES.values()
    environment = {name: value for name, value in os.environ.items() if name not in secrets}
    # Imports pass over what is no text, such as a Path; the working directory may be gone.
    paths = [each or os.curdir for each in sys.path if isinstance(each, str)]
    return {**environment, "PYTHONPATH": os.pathsep.join(paths)}


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
    """Have the kernel kill this process when its starter ends: the thread that started it, so `start_bound_process`.

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

    starter = threading.Thread(target=keep, name="starter", daemon=True)
    try:
        starter.start()
        return started.result()
    except KeyboardInterrupt:
        # No caller learns of the process, and it may be stopped, and so not notice that its starter is gone.
        started.add_done_callback(_kill)
        raise


def _kill(started: Future[subprocess.Popen[bytes]]) -> None:
    if started.exception() is None:
        started.result().kill()


def limit_memory(more: int, hard: int | None = None) -> None:
    """Limit this process to `more` bytes of addresses above its present use, and to `hard` if it lifts that."""
    try:
        with open("/proc/self/statm") as file:
            present = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # another system than Linux
        return
    limits = resource.getrlimit(resource.RLIMIT_AS)
    soft, highest = (sys.maxsize if each < 0 else each for each in limits)
    largest = highest if hard is None else min(present + hard, highest)
    resource.setrlimit(resource.RLIMIT_AS, (min(present + more, soft, largest), largest))


def run_in_fork(work: Callable[[], T], seconds: float, memory: int) -> T:
    """Return the result of `work` from a fork of this process, which the kernel ends even within a call into C.

    `seconds` are those of the processor, `memory` bytes above the present ones. TimeoutError or MemoryError if the work
    takes more, else its own error. For processes of one thread that do not ignore SIGCHLD.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            die_with_parent()
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_PROF, seconds)
            limit_memory(memory)
            result: object
            try:
                result = work()
            except Exception as error:
                result = error
            with open(writing, "wb") as file:
                pickle.dump(result, file, pickle.HIGHEST_PROTOCOL)
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        sent = file.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        raise TimeoutError
    if status or not sent:
        raise MemoryError
    value: Any = pickle.loads(sent)
    if isinstance(value, Exception):
        raise value
    return cast(T, value)
