"""llama.cpp's part of a round: its own bench tools, and what they print.

Neither tool samples: they decode random tokens, which is a little less than what the other engines do.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.process import Finished, PeerError, run
from benchmarks.peers.workload import Workload


def measure(
    tools: dict[str, Path], file: Path, workload: Workload, threads: int, timeout: float, repack: bool = True
) -> dict[str, Any]:
    """A round's figures of the GGUF file: three processes, of which the largest counts as memory.

    `repack` lets it lay quantised weights out anew.

    Start-up lasts until the tool reports a prompt and one token, so it includes one decode step more than elsewhere.
    """
    env = {"OMP_NUM_THREADS": str(threads)}
    repacks = [] if repack else ["--no-repack"]
    count = str(threads)
    cells = workload.max_num_seqs * (workload.prompt_len + workload.output_len)
    batched = [str(tools["llama-batched-bench"]), "-m", str(file), "-t", count, "-tb", count, "-npp"]
    batched += [str(workload.prompt_len), "--output-format", "jsonl", "-c", str(cells), *repacks]
    first = run([*batched, "-ntg", "1", "-npl", "1"], timeout, env)
    bench = [str(tools["llama-bench"]), "-m", str(file), "-t", count, "-p", str(workload.prefill_len), "-n", "0"]
    bench += ["--repack", str(int(repack))]
    prefill = run([*bench, "-r", str(workload.prefills), "-o", "json"], timeout, env)
    sizes = ",".join(str(size) for size in workload.batch_sizes)
    decode = run([*batched, "-ntg", str(workload.output_len), "-npl", sizes], timeout, env)
    rate, version = prefill_rate(prefill.lines, workload.prefill_len)
    return {
        "prefill": rate,
        "decode": decode_rates(decode.lines, workload.batch_sizes),
        "startup_seconds": _first_row(first),
        "peak_memory_bytes": max(process.peak_memory_bytes for process in (first, prefill, decode)),
        "version": version,
    }


def better(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Of two runs of a round, the better figure of each kind."""
    return {
        "prefill": max(one["prefill"], other["prefill"]),
        "decode": {size: max(rate, other["decode"][size]) for size, rate in one["decode"].items()},
        **{name: min(one[name], other[name]) for name in ("startup_seconds", "peak_memory_bytes")},
        "version": one["version"],
    }


def prefill_rate(lines: Sequence[str], prompt_len: int) -> tuple[float, str]:
    """The median of the rates in tokens/s, and the version, of `llama-bench -o json`.

    PeerError if it reports no prompt of that length.
    """
    text = "\n".join(lines)
    reports = json.loads(text[text.find("[\n") :]) if "[\n" in text else []
    for report in reports:
        if report["n_prompt"] == prompt_len and report["n_gen"] == 0:
            return statistics.median(report["samples_ts"]), f"build {report['build_commit']}"
    raise PeerError(f"llama-bench reported no prompt of {prompt_len} tokens")


def decode_rates(lines: Sequence[str], batch_sizes: Sequence[int]) -> dict[str, float]:
    """By batch size: tokens/s of `llama-batched-bench --output-format jsonl`. PeerError if it left one out."""
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    rates = {str(row["pl"]): row["pl"] * row["tg"] / row["t_tg"] for row in rows}
    missing = [size for size in batch_sizes if str(size) not in rates]
    if missing:
        raise PeerError(f"llama-batched-bench left out batch size {missing[0]}")
    return {str(size): rates[str(size)] for size in batch_sizes}


def _first_row(finished: Finished) -> float:
    for line, moment in zip(finished.lines, finished.moments, strict=True):
        if line.startswith("{"):
            return moment
    raise PeerError("llama-batched-bench reported nothing")
