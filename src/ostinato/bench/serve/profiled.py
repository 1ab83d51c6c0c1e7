"""A server that reports the processor time of its two processes.

`main` reads a job from stdin (JSON: `settings`, `port`, `directory`) and serves until SIGTERM. Each process has a file
in the directory, and writes its processor time to it when SIGUSR1 comes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ostinato.bench.serve.cost import used_here
from ostinato.bench.serve.sampler import ENGINE, ENGINE_PROCESS, FRONT, SERVER, Sampler
from ostinato.config import EngineConfig
from ostinato.engine.process.launch import make_engine
from ostinato.serve.server import serve
from ostinato.serve.settings import ServeSettings

if TYPE_CHECKING:
    from ostinato.engine.engine import EngineCore
    from ostinato.engine.run.runner import ProgressFn


@dataclass(frozen=True)
class ProfiledEngine:
    """Maker of an engine in its process, with a profile of that process."""

    directory: str

    def __call__(self, config: EngineConfig, progress: ProgressFn) -> EngineCore:
        engine = make_engine(config, progress)
        tell(Sampler(ENGINE), Path(self.directory), ENGINE_PROCESS)
        return engine


def tell(sampler: Sampler, directory: Path, name: str) -> None:
    """Start a sampler, have this process write its processor time on SIGUSR1, and report at once that it runs."""
    told = 0

    def write(*_: object) -> None:
        nonlocal told
        told += 1
        report = {"pid": os.getpid(), "told": told, "used": asdict(used_here(sampler))}
        written = directory / f"{name}.part"
        written.write_text(json.dumps(report), encoding="utf-8")
        written.replace(directory / f"{name}.json")

    signal.signal(signal.SIGUSR1, write)
    sampler.start()
    write()


def main() -> None:
    job = json.loads(sys.stdin.read())
    directory = Path(job["directory"])
    sampler = Sampler(FRONT)
    tell(sampler, directory, SERVER)
    try:
        status = serve(
            EngineConfig(**job["settings"]),
            ServeSettings(port=job["port"]),
            lambda what, done, total: None,
            lambda url: None,
            make=ProfiledEngine(str(directory)),
        )
    finally:
        sampler.stop()
    sys.exit(status)
