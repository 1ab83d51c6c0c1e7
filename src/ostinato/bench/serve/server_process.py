"""A server of Ostinato's own, in a process that ends with the benchmark."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from tempfile import TemporaryFile
from types import TracebackType
from typing import Any

from ostinato.errors import ModelError

PATIENCE = 30.0
"""Seconds that a server has to end after it was asked to."""
MOST_OUTPUT = 2000
"""Characters that are shown of what a server said before it failed."""


class ServerProcess:
    """`ostinato serve` on a free loopback port, as a context in which it is ready.

    Entering raises ModelError, with the end of what the server said, if it ended or was not ready in time.
    """

    def __init__(self, settings: Mapping[str, Any], ready_within: float = 600.0) -> None:
        self.port = _free_port()
        self.base_url = f"http://127.0.0.1:{self.port}/v1"
        self._flags = ["--host", "127.0.0.1", "--port", str(self.port), *setting_flags(settings)]
        self._ready_within = ready_within

    def __enter__(self) -> ServerProcess:
        command = [sys.executable, "-m", "ostinato.cli.main", "serve", *self._flags]
        self._output = TemporaryFile()
        # Without the keys of the user's own servers, which this one is not.
        environment = {name: value for name, value in os.environ.items() if name != "OSTINATO_API_KEY"}
        self._process = subprocess.Popen(command, stdout=self._output, stderr=subprocess.STDOUT, env=environment)
        try:
            self._wait()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def _wait(self) -> None:
        import httpx2

        deadline = time.monotonic() + self._ready_within
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ModelError(f"the server ended with status {self._process.returncode}; it said:\n{self._said()}")
            try:
                health = httpx2.get(f"http://127.0.0.1:{self.port}/health", timeout=5, trust_env=False)
                if health.status_code == 200:
                    return
            except httpx2.HTTPError:
                pass
            time.sleep(0.1)
        raise ModelError(f"the server was not ready after {self._ready_within:g} s; it said:\n{self._said()}")

    def _said(self) -> str:
        self._output.seek(0)
        return self._output.read().decode(errors="replace")[-MOST_OUTPUT:].strip()

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()


def setting_flags(settings: Mapping[str, Any]) -> list[str]:
    """Engine settings as flags of the command line."""
    flags = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", _written(value)]
    return flags


def _written(value: Any) -> str:
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, tuple | list):
        return ",".join(map(str, value))
    return str(value)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
