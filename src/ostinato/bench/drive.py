"""Runs a workload on an engine, step by step, and notes when each token came."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ostinato.bench.trace import Trace
from ostinato.bench.workload import Workload
from ostinato.config import EngineConfig
from ostinato.errors import ConfigError, Remedy
from ostinato.models.checkpoint import load_spec

if TYPE_CHECKING:
    from ostinato.engine.engine import Engine


def bench_config(settings: dict[str, Any], workload: Workload) -> EngineConfig:
    """`settings` with room for the workload, where they leave that open.

    ConfigError where they give less than it needs.
    """
    return with_room(settings, max_num_seqs=max(workload.batch_sizes), max_model_len=workload.max_model_len)


def with_room(settings: dict[str, Any], **needed: int) -> EngineConfig:
    """`settings` with `needed`, the least value of each limit, where they leave it open.

    ConfigError where they give less, or the model cannot have requests of that length.
    """
    config = EngineConfig(**settings)
    length = needed.get("max_model_len", 0)
    spec = load_spec(config)
    longest, can_stretch = spec.max_position_embeddings, spec.rope is not None and spec.rope.kind in ("dynamic", "yarn")
    if longest is not None and length > longest and not can_stretch:
        raise ConfigError(
            f"the benchmark's requests are {length} tokens long, and the model can do {longest}; ask for shorter ones"
        )
    for name, least in needed.items():
        if not config.is_given(name):
            config = config.with_settings(**{name: least})
        elif getattr(config, name) < least:
            message = f"{name} is {getattr(config, name)}, and the benchmark's requests need {least}"
            raise ConfigError(message, [Remedy(name, least)])
    return config


def run_rounds(
    engine: Engine,
    workload: Workload,
    batch_size: int,
    first_round: int = 0,
    report: Callable[[str], None] = lambda _: None,
) -> list[Trace]:
    """A trace of each round, after a warm-up round that is not counted."""
    vocab_size = engine.spec.vocab_size
    report(f"batch size {batch_size}: warming up")
    run_batch(engine, workload.prompts(batch_size, vocab_size, -1), workload.warm_up().output_len)
    traces = []
    for number in range(first_round, first_round + workload.rounds):
        report(f"batch size {batch_size}: round {number + 1}")
        prompts = workload.prompts(batch_size, vocab_size, number)
        traces.append(run_batch(engine, prompts, workload.output_len))
    return traces


def run_batch(engine: Engine, prompts: list[list[int]], output_len: int, *, ignore_eos: bool = True) -> Trace:
    """Adds all prompts at once and steps until they are answered."""
    from ostinato.sample.params import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=ignore_eos)
    step_ends: list[float] = []
    begin = time.perf_counter()
    token_times: dict[str, list[float]] = {engine.add(prompt, params): [] for prompt in prompts}
    while engine.has_unfinished:
        outputs = engine.step()
        now = time.perf_counter() - begin
        step_ends.append(now)
        for output in outputs:
            if output.error is not None:
                raise output.error
            times = token_times[output.request_id]
            times.extend([now] * (len(output.outputs[0].token_ids) - len(times)))
    return Trace(sum(map(len, prompts)), list(token_times.values()), step_ends)
