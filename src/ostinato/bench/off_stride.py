"""Prefill with step sizes that lie on the ladder's stride and off it: neither may lose its graph."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ostinato.bench.drive import in_turns, plan_of, run_batch
from ostinato.bench.reports import Column, Say, Table, count, digits, spread_columns
from ostinato.bench.trace import spread

if TYPE_CHECKING:
    from ostinato.config import EngineConfig
    from ostinato.engine.engine import Engine

MAX_CAPTURE_SIZE = 1024
STEPS = 3
"""Steps of a round, all full."""


def off_stride(config: EngineConfig, budgets: Sequence[int], prompt_len: int, rounds: int, say: Say) -> dict[str, Any]:
    """Prefill tokens/s with each of `budgets` as `max_num_batched_tokens`, in turns, one engine each, strict.

    `ratio` is the first one's rate over the last one's, round by round. A round is prompts of `prompt_len` tokens that
    fill a few steps, and one token of output for each. Graphs are captured in a first round that is not counted.
    """
    from ostinato.engine.engine import Engine

    engines = {}
    for budget, each in off_stride_configs(config, budgets).items():
        say(f"max_num_batched_tokens {budget}: loading and capturing")
        engines[budget] = Engine(each)
        _run(engines[budget], budget, prompt_len, number=-1)
    before = {budget: engine.stats() for budget, engine in engines.items()}
    rates: dict[int, list[float]] = {budget: [] for budget in budgets}
    for number in range(rounds):
        say(f"off stride: round {number + 1} of {rounds}")
        for budget in in_turns(list(engines), number):
            rates[budget].append(_run(engines[budget], budget, prompt_len, number))
    first, last = rates[budgets[0]], rates[budgets[-1]]
    return {
        "max_capture_size": engines[budgets[0]].plan.capture.max_tokens,
        "strict": True,
        "ratio": spread([one / other for one, other in zip(first, last, strict=True)]),
        "results": [
            {
                "max_num_batched_tokens": budget,
                "prompt_tokens": budget * STEPS,
                "prefill_tokens_per_second": spread(rates[budget]),
                **_steps_since(before[budget]["graphs"], engine.stats()["graphs"]),
            }
            for budget, engine in engines.items()
        ],
    }


def off_stride_configs(config: EngineConfig, budgets: Sequence[int]) -> dict[int, EngineConfig]:
    """The settings for each budget: a graph for every step that it allows, and an equal part of the cache's memory."""
    changes: dict[str, Any] = {"strict": True, "capture": "lazy"}
    if not config.is_given("capture_sizes"):
        changes["max_capture_size"] = max(MAX_CAPTURE_SIZE, *budgets)
    configs = {budget: config.with_settings(max_num_batched_tokens=budget, **changes) for budget in budgets}
    if config.is_given("cache_memory"):
        return configs
    plans = [plan_of(each) for each in configs.values()]
    memories = [plan.memory for plan in plans]
    part = min(memory.cache for memory in memories) // len(configs)
    if plans[0].device.kind == "cuda":
        beside = sum(memory.beside_cache for memory in memories)
        part = min(part, (memories[0].available - beside) // len(configs))
    return {budget: each.with_settings(cache_memory=max(1, part)) for budget, each in configs.items()}


def prompt_lengths(budget: int, prompt_len: int) -> list[int]:
    """Lengths of prompts that fill `STEPS` steps of `budget` tokens exactly; the last prompt may be shorter."""
    whole, rest = divmod(budget * STEPS, prompt_len)
    return [prompt_len] * whole + ([rest] if rest else [])


def _run(engine: Engine, budget: int, prompt_len: int, number: int) -> float:
    """Tokens/s of a round, whose prompts are its own."""
    rng, vocab_size = random.Random(f"{number} {budget}"), engine.spec.vocab_size
    prompts = [[rng.randrange(vocab_size) for _ in range(length)] for length in prompt_lengths(budget, prompt_len)]
    trace = run_batch(engine, prompts, output_len=1)
    return trace.prompt_tokens / trace.end


def _steps_since(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Steps by how they ran, and the padding, since the statistics `before`."""
    steps = {mode: count - before["steps"][mode] for mode, count in after["steps"].items()}
    return {"steps": steps, "padding": after["padding"] - before["padding"]}


def off_stride_table(figures: Mapping[str, Any]) -> Table:
    """Prompt tokens/s by max_num_batched_tokens, and how the steps ran."""
    results = figures["results"]
    rows = [
        {
            "name": result["max_num_batched_tokens"],
            "rate": {name: count(rate) for name, rate in result["prefill_tokens_per_second"].items()},
            **result["steps"],
            "padding": result["padding"],
        }
        for result in results
    ]
    ratio = {name: digits(3)(value) for name, value in figures["ratio"].items()}
    steps = dict.fromkeys(("piecewise", "full", "eager", "padding"))
    rows.append({"name": f"{rows[0]['name']} over {rows[-1]['name']}", "rate": ratio, **steps})
    spread_of = spread_columns("rate", str)
    columns = (Column("tokens/s", "rate.median"), *spread_of[1:], *(Column(name, name, count) for name in steps))
    return Table((Column("step size", "name"), *columns), rows, "prefill by step size")
