"""One measurement in a separate process: a job on stdin, its result on stdout, both JSON.

So engines that are compared share neither memory nor threads, and a start-up is a whole one.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from importlib import import_module
from typing import Any

from ostinato import errors
from ostinato.errors import OstinatoError, Remedy

ENTERED = time.monotonic()

JOBS = {
    "ostinato": "ostinato.bench.comparison:answer",
    "transformers": "ostinato.bench.comparison:answer_by_transformers",
    "startup": "ostinato.bench.throughput:answer_startup",
    "floor": "ostinato.bench.floor:answer",
    "generate": "ostinato.bench.serve.overhead:answer",
    "gpu": "ostinato.bench.gpu.measures:answer",
}
"""Module and function for each kind of job."""

COMMAND = (sys.executable, "-m", "ostinato.bench.worker")


def run_in_process(kind: str, job: dict[str, Any]) -> dict[str, Any]:
    """Run `job` in a fresh process and return its result, with `peak_memory_bytes` of that process.

    An OstinatoError in the process is raised here; any other failure is a CalledProcessError, its traceback on stderr.
    """
    request = request_of(kind, job)
    return result_of(subprocess.run(COMMAND, input=request, stdout=subprocess.PIPE, text=True, check=True).stdout)


def request_of(kind: str, job: dict[str, Any]) -> str:
    """Return the input of a process of `COMMAND`."""
    return json.dumps({"kind": kind, "began": time.monotonic(), **job})


def result_of(answer: str) -> dict[str, Any]:
    """Return the result that such a process wrote. An OstinatoError in it is raised here."""
    result: dict[str, Any] = json.loads(answer.splitlines()[-1])
    if "error" in result:
        error = result["error"]
        remedies = [Remedy(remedy["setting"], remedy["value"]) for remedy in error["remedies"]]
        raise getattr(errors, error["type"])(error["message"], remedies)
    return result


def main() -> None:
    job = json.loads(sys.stdin.read())
    try:
        module, function = JOBS[job["kind"]].split(":")
        result = getattr(import_module(module), function)({"entered": ENTERED, **job})
    except OstinatoError as error:
        print(json.dumps(error.to_json()))
        return
    # Linux counts in KiB.
    result["peak_memory_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps(result))


if __name__ == "__main__":
    main()
