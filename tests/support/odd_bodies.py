"""A body whose preparation goes wrong in every way: for the processes that read bodies."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from ostinato.serve.http.json_bodies import Body


class OddBody(Body):
    path: str
    """Where the worker's id is written when it begins."""
    does: str

    def prepare(self, context: Any) -> Any:
        begun = Path(f"{self.path}.new")
        begun.write_text(str(os.getpid()))
        begun.rename(self.path)
        if self.does == "hold":
            while True:  # without a call that lets go of the lock
                pass
        if self.does == "fill":
            return len(bytearray(2 * context.settings.worker_memory))
        if self.does == "die once":
            died = Path(f"{self.path}.died")
            if not died.exists():
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        if self.does == "die":
            with open(f"{self.path}.deaths", "a") as file:
                file.write(f"{os.getpid()}\n")
            os.kill(os.getpid(), signal.SIGKILL)
        if self.does == "raise":
            raise KeyError("a secret")
        return os.getpid()
