"""A process that compiles guides and takes their first tokens, for guides that may end it: `GuideChild`.

`python -m tests.support.guide_trials` is that process: a guide as JSON on each line, an answer on each.
"""

from __future__ import annotations

import contextlib
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from ostinato.demo import checkpoint_dir
from ostinato.engine.text.tokenizer import load_tokenizer
from ostinato.errors import RequestError
from ostinato.sampling.grammar import GrammarCompiler
from ostinato.sampling.guide import Guide

ROOT = Path(__file__).parents[2]
_MOST_ADDRESSES = 2**31
"""Bytes more than at the start; with the stack that a guide is compiled on."""
_MOST_SECONDS = 20
"""Of the processor, after which a guide counts as one that never ends."""


class Trial(NamedTuple):
    """What came of a guide."""

    refusal: str | None
    seconds: float
    """Of the processor"""
    megabytes: float
    """By which the peak of memory grew"""


class GuideChild:
    """The process, started again when it has died."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def attempt(self, guide: dict[str, Any]) -> Trial | None:
        """Return what came of a guide, None if the process died of it."""
        if self.process is None:
            command = [sys.executable, "-m", "tests.support.guide_trials"]
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, cwd=ROOT
            )
        process = self.process
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(guide) + "\n")
            process.stdin.flush()
        if answer := process.stdout.readline():
            return Trial(*json.loads(answer))
        self.close()
        return None

    def close(self) -> None:
        if self.process is not None:
            process, self.process = self.process, None
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    assert stream is not None
                    stream.close()


def main() -> None:
    tokenizer = load_tokenizer(checkpoint_dir())
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [1])
    compiler.try_out(Guide(json_object=True))
    addresses = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (addresses + _MOST_ADDRESSES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        begin, peak, refusal = time.process_time(), _peak(), None
        resource.setrlimit(resource.RLIMIT_CPU, (int(begin) + _MOST_SECONDS, resource.RLIM_INFINITY))
        try:
            compiler.try_out(Guide(**json.loads(line)))
        except RequestError as error:
            refusal = error.message
        print(json.dumps(Trial(refusal, time.process_time() - begin, _peak() - peak)), flush=True)


def _peak() -> float:
    """Return the most memory that this process had at a time, in megabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
