"""Runner of requests on an engine, step by step, with the time of every token.

Each measurement runs in a separate process: a job on stdin, its result on stdout, both JSON. So the engines that are
compared share neither memory nor threads, and each start-up is a complete one.
"""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, TypeVar

from ostinato import errors
from ostinato.bench.statistics import RoundTrace
from ostinato.config import EngineConfig
from ostinato.errors import CapacityError, ConfigError, OstinatoError, Remedy
from ostinato.json_io import JsonObject
from ostinato.models.checkpoint import load_spec
from ostinato.plan.device.detect import detect
from ostinato.plan.plan import Plan, make_plan
from ostinato.units import format_bytes

if TYPE_CHECKING:
    from ostinato.bench.report import ProgressCallback
    from ostinato.engine.core import EngineCore
    from ostinato.media.media_prompt import MediaPrompt


K = TypeVar("K")
T = TypeVar("T")

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Workload:
    """Requests of `prompt_len` random tokens and `output_len` greedy ones, end tokens ignored."""

    prompt_len: int
    output_len: int
    batch_sizes: tuple[int, ...]
    rounds: int

    @property
    def max_model_len(self) -> int:
        return self.prompt_len + self.output_len

    def warm_up(self) -> Workload:
        """Return the round that is not counted: the same prompts, few tokens of output."""
        return replace(self, output_len=min(self.output_len, WARM_UP_TOKENS))

    def prompts(self, batch_size: int, vocab_size: int, number: int) -> list[list[int]]:
        """Return the token ids of round `number`: others in each round, so that none finds its prefix cached."""
        rng = random.Random(f"{number} {batch_size}")
        return [[rng.randrange(vocab_size) for _ in range(self.prompt_len)] for _ in range(batch_size)]


def bench_config(settings: dict[str, object], workload: Workload) -> EngineConfig:
    """Return `settings` with room for the workload, as `with_room` makes it."""
    return with_room(settings, max_num_seqs=max(workload.batch_sizes), max_model_len=workload.max_model_len)


def with_room(settings: JsonObject, **needed: int) -> EngineConfig:
    """Return `settings` with `needed`, the least value of each limit, for the limits that they leave open.

    All graphs are captured beforehand, unless the settings say otherwise. Raises ConfigError if they give less, or the
    model cannot have requests of that length.
    """
    config = EngineConfig(**settings)
    if config.capture == "auto":
        config = config.with_settings(capture="startup")  # outside the measured time
    length = needed.get("max_model_len", 0)
    spec = load_spec(config)
    longest, can_stretch = spec.max_position_embeddings, spec.rope is not None and spec.rope.kind in ("dynamic", "yarn")
    if longest is not None and length > longest and not can_stretch:
        raise ConfigError(
            f"the benchmark's requests are {length} tokens long, and the model can do {longest}; ask for fewer "
            "in --prompt-len and --output-len"
        )
    for name, least in needed.items():
        if not config.is_given(name):
            config = config.with_settings(**{name: least})
        elif getattr(config, name) < least:
            message = f"{name} is {getattr(config, name)}, and the benchmark's requests need {least}"
            raise ConfigError(message, [Remedy(name, least)])
    return config


def check_lone_steps(settings: JsonObject, *, has_drafts: bool = False) -> None:
    """Raise ConfigError for several ranks, and for drafts unless `has_drafts`: the steps have no engine around them."""
    if settings.get("speculative") and not has_drafts:
        raise ConfigError("this benchmark times steps without drafts; leave speculative out")
    ranks = settings.get("tensor_parallel_size", 1)
    if ranks > 1:
        message = (
            f"tensor_parallel_size {ranks}: this benchmark times steps of one process, for which others would wait"
        )
        raise ConfigError(message, [Remedy("tensor_parallel_size", 1)])


def plan_of(config: EngineConfig) -> Plan:
    """Return the plan that an engine with these settings would make."""
    return make_plan(config, load_spec(config), detect(config.device))


def share_cache(
    configs: Mapping[K, EngineConfig], plan: Callable[[EngineConfig], Plan] = plan_of
) -> dict[K, EngineConfig]:
    """Return `configs` of engines in one process, with equal parts of the cache memory.

    If `cache_memory` is open, all get an equal part: of what the plan would give one, or on a GPU of what all their
    weights and activations leave. Raises CapacityError if that is too little.
    """
    number = len(configs)
    if number == 1 or any(config.is_given("cache_memory") for config in configs.values()):
        return dict(configs)
    plans = [plan(config) for config in configs.values()]
    memories = [made.memory for made in plans]
    part = max(memory.cache for memory in memories) // number
    if plans[0].device.kind == "cuda":
        beside = sum(memory.beside_cache for memory in memories)
        part = min(part, (memories[0].available - beside) // number)
    shared = {key: each.with_settings(cache_memory=max(1, part)) for key, each in configs.items()}
    try:
        for each in shared.values():
            plan(each)
    except CapacityError as error:
        left = format_bytes(max(0, part))
        message = f"{number} configurations leave each {left} for its cache: compare fewer of them ({error.message})"
        raise CapacityError(message) from None
    return shared


def rotated_order(things: Sequence[T], number: int) -> list[T]:
    """Return all of `things`, in round `number` beginning with another one than in the round before."""
    first = number % len(things)
    return [*things[first:], *things[:first]]


def run_rounds(engine: EngineCore, workload: Workload, batch_size: int, say: ProgressCallback) -> list[RoundTrace]:
    """Return a trace of each round, after a warm-up round that is not counted."""
    vocab_size = engine.spec.vocab_size
    say(f"batch size {batch_size}: warming up")
    run_batch(engine, workload.prompts(batch_size, vocab_size, -1), workload.warm_up().output_len)
    traces = []
    for number in range(workload.rounds):
        say(f"batch size {batch_size}: round {number + 1}")
        traces.append(run_batch(engine, workload.prompts(batch_size, vocab_size, number), workload.output_len))
    return traces


def run_batch(
    engine: EngineCore,
    prompts: list[list[int]],
    output_len: int,
    *,
    ignore_eos: bool = True,
    is_forced: bool = False,
    media: MediaPrompt | None = None,
) -> RoundTrace:
    """Add all prompts at once and step until they are answered.

    `media` are the images of a single prompt. Forced outputs repeat the last token of their prompt.
    """
    from ostinato.runner.draft_override import forced_token_params
    from ostinato.sampling.params import SamplingParams

    params = [SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=ignore_eos)] * len(prompts)
    if is_forced:
        params = [forced_token_params(prompt[-1], seed, output_len) for seed, prompt in enumerate(prompts)]
    step_ends: list[float] = []
    begin = time.perf_counter()
    token_times: dict[str, list[float]] = {
        engine.add_request(prompt, each, media=media): [] for prompt, each in zip(prompts, params, strict=True)
    }
    tokens: dict[str, list[int]] = {}
    while engine.has_unfinished:
        outputs = engine.step()
        now = time.perf_counter() - begin
        step_ends.append(now)
        for output in outputs:
            if output.error is not None:
                raise output.error
            tokens[output.request_id] = output.outputs[0].token_ids
            times = token_times[output.request_id]
            times.extend([now] * (len(output.outputs[0].token_ids) - len(times)))
    written = tuple(tuple(tokens[request_id]) for request_id in token_times)
    return RoundTrace(sum(map(len, prompts)), list(token_times.values()), step_ends, written)


ENTERED = time.monotonic()

JOBS = {
    "ostinato": "ostinato.bench.peers:run_job",
    "transformers": "ostinato.bench.peers:answer_by_transformers",
    "startup": "ostinato.bench.throughput:answer_startup",
    "floor": "ostinato.bench.roofline:run_job",
    "generate": "ostinato.bench.serve.overhead:run_job",
    "gpu": "ostinato.bench.gpu.parts:run_job",
}
"""Module and function for each kind of job."""

COMMAND = (sys.executable, "-m", "ostinato.bench.engine_driver")


def run_in_process(kind: str, job: JsonObject) -> JsonObject:
    """Run `job` in a fresh process and return its result, with `peak_memory_bytes` of that process.

    An OstinatoError in the process is raised here; any other failure is a CalledProcessError, its traceback on stderr.
    """
    request = request_of(kind, job)
    return result_of(subprocess.run(COMMAND, input=request, stdout=subprocess.PIPE, text=True, check=True).stdout)


def request_of(kind: str, job: JsonObject) -> str:
    """Return the input of a process of `COMMAND`."""
    return json.dumps({"kind": kind, "began": time.monotonic(), **job})


def result_of(answer: str) -> JsonObject:
    """Return the result that such a process wrote. An OstinatoError in it is raised here."""
    result: JsonObject = json.loads(answer.splitlines()[-1])
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
