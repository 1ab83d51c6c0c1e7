"""What routing by checkpointed prefixes gains on multi-turn traffic: one engine, replicas with this router, and
replicas with two choices, each a server of its own under the same `ostinato bench serve --turns`. One engine on Ray
beside one without it shows what Ray adds to a first token and to each further one.

    python benchmarks/replicas.py MODEL --replicas 2,4 --output FILE.json

Prints a table of hit rates, times to the first token, throughput, and the most loaded replica over the mean; with
--output the same as JSON. Needs `pip install 'ostinato[ray]'` and a quiet machine with a core for each replica.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ostinato.cli.output import note

START_SECONDS = 600
_COMPUTED = re.compile(r"^\w+:computed_tokens_total{.*} ([\d.e+-]+)$", re.M)
COLUMNS = {
    "hit rate": "hit_rate",
    "most loaded / mean": "most_of_mean",
    "first token p50, s": "first_token_p50",
    "first token p90, s": "first_token_p90",
    "further token p50, ms": "further_token_p50",
    "output tokens/s": "output_tokens_per_second",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("model")
    parser.add_argument("--replicas", default="2", help="numbers to measure, such as 2,4")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--conversations", type=int, default=40)
    parser.add_argument("--rate", default="2", help="conversations per second; the same for all, or the load differs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt-tokens", default="64")
    parser.add_argument("--output-tokens", default="32")
    parser.add_argument("--shared-prefix", default="512")
    parser.add_argument("--output", type=Path)
    parser.add_argument("flags", nargs="*", help="of `ostinato serve`, behind --")
    given = parser.parse_args()
    counts = [int(count) for count in given.replicas.split(",")]
    layouts = [("one engine", []), ("one engine on Ray", ["--replicas", "1"])]
    for count in counts:
        for routing in ("prefix", "two_choices"):
            layouts.append((f"{count} replicas, {routing}", ["--replicas", str(count), "--routing", routing]))
    found = []
    for number in range(given.rounds):
        for name, flags in layouts:
            note(f"round {number + 1}: {name}")
            with server(given.model, [*given.flags, *flags], replicas=_count(flags)) as url:
                found.append({"layout": name, "round": number, **measured(url, given, seed=number)})
    if given.output is not None:
        given.output.write_text(
            json.dumps({"settings": vars(given) | {"output": str(given.output)}, "runs": found}, indent=2) + "\n"
        )
    print(table(found))


def _count(flags: Sequence[str]) -> int:
    return int(flags[1]) if flags else 1


@contextmanager
def server(model: str, flags: Sequence[str], replicas: int) -> Iterator[str]:
    """The URL of a server, once all of its replicas are there."""
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-m", "ostinato", "serve", model, "--port", "0", *flags]
        process = subprocess.Popen(command, stderr=log, stdout=log)
        try:
            yield _url(process, log, replicas)
        finally:
            process.terminate()
            process.wait(120)


def _url(process: subprocess.Popen[bytes], log: Any, replicas: int) -> str:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        log.seek(0)
        told = log.read()
        listening = re.search(r"listening on (\S+)", told)
        is_ready = f"there are {replicas}" in told if replicas > 1 else " is ready" in told
        if listening is not None and is_ready:
            return listening[1]
        time.sleep(0.2)
    log.seek(0)
    raise SystemExit(f"the server did not start:\n{log.read()}")


def measured(url: str, given: argparse.Namespace, seed: int) -> dict[str, Any]:
    """One run of conversations against a fresh server."""
    flags = {
        "--base-url": f"{url}/v1",
        "--rate": given.rate,
        "--requests": given.conversations,
        "--turns": given.turns,
        "--prompt-tokens": given.prompt_tokens,
        "--output-tokens": given.output_tokens,
        "--shared-prefix": given.shared_prefix,
        "--seed": seed,
    }
    words = [str(word) for pair in flags.items() for word in pair]
    command = [sys.executable, "-m", "ostinato", "bench", "serve", *words, "--ignore-eos", "--json"]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    [result] = report["results"]
    work = computed_tokens(url)
    tokens, first = result["tokens"], result["time_to_first_token"]
    return {
        "hit_rate": tokens["cached"] / tokens["prompt"],
        "most_of_mean": max(work) * len(work) / sum(work),
        "first_token_p50": first["p50"],
        "first_token_p90": first["p90"],
        "further_token_p50": 1000 * result["time_per_output_token"]["p50"],
        "output_tokens_per_second": result["output_tokens_per_second"],
        "report": report,
    }


def computed_tokens(url: str) -> list[float]:
    """Tokens that went through the model, by replica."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        return [float(count) for count in _COMPUTED.findall(answer.read().decode())]


def table(found: Sequence[dict[str, Any]]) -> str:
    """Least to most over the rounds."""
    rows = [f"| | {' | '.join(COLUMNS)} |", f"|---{'|---' * len(COLUMNS)}|"]
    for name in dict.fromkeys(each["layout"] for each in found):
        runs = [each for each in found if each["layout"] == name]
        figures = [spread([each[key] for each in runs]) for key in COLUMNS.values()]
        rows.append(f"| {name} | {' | '.join(figures)} |")
    return "\n".join(rows)


def spread(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"


if __name__ == "__main__":
    main()
