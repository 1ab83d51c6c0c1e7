"""The engines that can be measured, and how each is asked for a round."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.peers import llama
from benchmarks.peers.places import Places
from benchmarks.peers.process import Finished, PeerError, run
from benchmarks.peers.report import GGUF_KINDS
from benchmarks.peers.workload import Workload

CACHE_BYTES = 4 * 2**30
"""Of blocks and slots, for the engines that take such a size: Ostinato and vLLM."""
LLAMA_TOOLS = ("llama-bench", "llama-batched-bench", "llama-quantize")
LLAMA_TOKENIZE = "llama-tokenize"
WORKER = [sys.executable, "-m", "ostinato.bench.engine_driver"]
VLLM_WORKER = Path(__file__).with_name("vllm_worker.py")


@dataclass(frozen=True)
class Round:
    """One model in one round, the same for every engine."""

    places: Places
    model: str
    vocab_size: int
    number: int
    workload: Workload
    threads: int
    timeout: float

    def job(self, **more: Any) -> dict[str, Any]:
        settings = {"model": str(self.places.checkpoint(self.model)), "threads": self.threads}
        batches = self.workload.batches(self.vocab_size, self.number)
        return {"settings": settings, "batches": batches, "dtype": "bfloat16", **more}

    def ask(self, command: Sequence[str], job: dict[str, Any], env: dict[str, str] | None = None) -> dict[str, Any]:
        """The answer of a process that takes a job and answers on the last line of stdout, with its tree's memory."""
        threads = {"OMP_NUM_THREADS": str(self.threads)}
        finished = run(command, self.timeout, threads | (env or {}), json.dumps({"began": time.monotonic(), **job}))
        return {**answer_of(finished), "peak_memory_bytes": finished.peak_memory_bytes}


@dataclass(frozen=True)
class Engine:
    measure: Callable[[Round], dict[str, Any]]
    """A round's figures: prefill and decode in tokens/s, startup_seconds, peak_memory_bytes, version."""
    missing: Callable[[Places], str | None]
    """Why it cannot be measured, in words; None if it is there."""
    gguf: str | None = None
    """The kind of file that it needs, of llama.cpp's."""
    floor: str | None = None
    """The weights whose bytes are the floor of its steps, where it is one of ours: see `our_settings`."""


def answer_of(finished: Finished) -> dict[str, Any]:
    """What a worker answered, among all that its engine printed. PeerError if that is an error, or nothing."""
    answers = [line for line in finished.lines if line.startswith(('{"traces"', '{"error"', '{"read"'))]
    if not answers:
        raise PeerError("it ended without an answer")
    answer: dict[str, Any] = json.loads(answers[-1])
    if "error" in answer:
        raise PeerError(answer["error"]["message"])
    return answer


def our_settings(one: Round, weights: str) -> dict[str, Any]:
    """Ostinato's, with `weights` in bfloat16 or int8, or as they lie in a kind of GGUF file."""
    settings: dict[str, Any] = {"dtype": "bfloat16", "cache_memory": CACHE_BYTES, "enable_prefix_caching": False}
    if weights == "int8":
        settings["quantization"] = weights
    elif weights in GGUF_KINDS:
        settings["model"] = str(one.places.gguf(one.model, weights))
    return settings


def ostinato(weights: str) -> Callable[[Round], dict[str, Any]]:
    from ostinato import __version__

    def measure(one: Round) -> dict[str, Any]:
        job = one.job(kind="ostinato")
        job["settings"] |= our_settings(one, weights)
        return _figures(one, {"version": __version__, **one.ask(WORKER, job)})

    return measure


def transformers(one: Round) -> dict[str, Any]:
    job = one.job(kind="transformers", device="cpu", threads=one.threads)
    return _figures(one, one.ask(WORKER, job))


def vllm(eager: bool) -> Callable[[Round], dict[str, Any]]:
    def measure(one: Round) -> dict[str, Any]:
        cores = sorted(os.sched_getaffinity(0))[: one.threads]
        cache = one.places.vllm_cache
        openmp = one.places.vllm / "lib" / "libiomp5.so"
        env = {
            "VLLM_CPU_KVCACHE_SPACE": str(CACHE_BYTES // 2**30),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in cores),
            "VLLM_CACHE_ROOT": str(cache),
            # Its manual says so; the library comes with it.
            "LD_PRELOAD": str(openmp) if openmp.exists() else "",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        workload = one.workload
        sizes = {"max_model_len": workload.max_model_len, "max_num_seqs": workload.max_num_seqs}
        # A first start compiles the model; later ones load what it left.
        started = cache / f"{one.model}{'-eager' if eager else ''}.started"
        is_first = not started.exists()
        cache.mkdir(parents=True, exist_ok=True)
        answer = one.ask([str(one.places.vllm_python), str(VLLM_WORKER)], one.job(eager=eager, **sizes), env)
        started.touch()
        figures = _figures(one, answer)
        if is_first:
            figures["first_start_seconds"] = figures.pop("startup_seconds")
        return figures

    return measure


def llama_cpp(kind: str) -> Callable[[Round], dict[str, Any]]:
    def measure(one: Round) -> dict[str, Any]:
        tools = {name: one.places.llama_tool(name) for name in LLAMA_TOOLS}
        file = one.places.gguf(one.model, kind)
        run_with = partial(llama.measure, tools, file, one.workload, one.threads, one.timeout)
        return run_with() if kind == "bf16" else llama.better(run_with(), run_with(repack=False))

    return measure


def floor(one: Round, weights: str) -> dict[str, Any]:
    """The memory's bandwidth, and what Ostinato's decode steps must move; see `ostinato.bench.roofline`."""
    context = one.workload.prompt_len + one.workload.output_len / 2
    job = one.job(kind="floor", rows=one.workload.batch_sizes, context=context)
    job["settings"] |= our_settings(one, weights)
    return one.ask(WORKER, job)


def _figures(one: Round, answer: dict[str, Any]) -> dict[str, Any]:
    kept = {name: answer[name] for name in ("startup_seconds", "peak_memory_bytes", "version")}
    return {**one.workload.rates(answer["traces"]), **kept}


def _no_transformers(_: Places) -> str | None:
    return None if find_spec("transformers") else "transformers is not installed beside Ostinato"


def _no_vllm(places: Places) -> str | None:
    return None if places.vllm_python.exists() else f"there is no {places.vllm_python}"


def _no_llama(places: Places) -> str | None:
    absent = [tool for tool in LLAMA_TOOLS if not places.llama_tool(tool).exists()]
    return f"there is no {places.llama_tool(absent[0])}" if absent else None


def _always_there(_: Places) -> str | None:
    return None


ENGINES = {
    "ostinato": Engine(ostinato("bfloat16"), _always_there, floor="bfloat16"),
    "ostinato-int8": Engine(ostinato("int8"), _always_there, floor="int8"),
    **{f"ostinato-{kind}": Engine(ostinato(kind), _no_llama, gguf=kind, floor=kind) for kind in GGUF_KINDS},
    "vllm": Engine(vllm(eager=False), _no_vllm),
    "vllm-eager": Engine(vllm(eager=True), _no_vllm),
    "llama.cpp": Engine(llama_cpp("bf16"), _no_llama, gguf="bf16"),
    **{f"llama.cpp-{kind}": Engine(llama_cpp(kind), _no_llama, gguf=kind) for kind in GGUF_KINDS},
    "transformers": Engine(transformers, _no_transformers),
}
