"""`ostinato serve` as a process of a test."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx2

from tests.support.patience import PATIENCE

RUN = "from ostinato.cli.main import main; main()"
ENGINE = ["--model", "demo", "--dtype", "float32", "--threads", "1", "--max-num-seqs", "4", "--graph-mode", "none"]


class Process:
    """A server of its own, which is ended with the test."""

    def __init__(self, *flags, code=RUN, port="0", **environment):
        where = [] if port is None else ["--port", port]
        command = [sys.executable, "-c", code, "serve", *ENGINE, *where, *flags]
        env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
        self.lines = []
        self.reading = threading.Thread(target=self._read, daemon=True)
        self.reading.start()

    def _read(self):
        for line in self.process.stderr:
            self.lines.append(line)

    def until(self, condition, seconds=PATIENCE):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "".join(self.lines)
            time.sleep(0.01)

    @property
    def url(self):
        self.until(lambda: self.process.poll() is not None or any("listening on" in line for line in self.lines))
        [line] = [line for line in self.lines if "listening on" in line]
        return line.split()[2]

    def ready(self, get=httpx2.get):
        """The server's URL, once it is ready. `get` reaches it, where httpx2 alone does not."""
        url = self.url
        self.until(lambda: self.process.poll() is not None or get(f"{url}/health", timeout=PATIENCE).status_code == 200)
        return url

    def engine_pid(self):
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")

        def engines():
            return [pid for pid in children.read_text().split() if is_engine(pid)]

        def is_engine(pid):
            with contextlib.suppress(OSError):  # one that has ended
                return "ostinato.engine.process.child" in Path(f"/proc/{pid}/cmdline").read_text()
            return False

        self.until(engines)
        [pid] = engines()
        return int(pid)

    def descendants(self):
        """The processes that it has started, and those that they have."""
        found, parents = [], [self.process.pid]
        while parents:
            for thread in Path(f"/proc/{parents.pop()}/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    children = thread.read_text().split()
                    parents += children
                    found += children
        return found

    def status(self):
        """The exit status, once all that was said is in `lines`."""
        status = self.process.wait(PATIENCE)
        self.reading.join(PATIENCE)
        return status
