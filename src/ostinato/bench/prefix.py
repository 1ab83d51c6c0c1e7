"""The prefix cache under several workloads, modes and policies, side by side in one run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from ostinato.bench.drive import with_room
from ostinato.bench.facts import machine_facts, model_facts
from ostinato.bench.prefix_figures import prefix_figures, second_turn_figures
from ostinato.bench.prefix_run import Round, run_round
from ostinato.bench.prefix_variants import COMPARED, Variant, check_open, choose_variants, configs_of, find_baseline
from ostinato.bench.prefix_workloads import Ask, Sizes, make_asks
from ostinato.config import EngineConfig
from ostinato.models.checkpoint import load_spec
from ostinato.plain_data import to_plain
from ostinato.plan.device.detect import detect
from ostinato.plan.plan import Plan

if TYPE_CHECKING:
    from ostinato.engine.engine import Engine


@dataclass(frozen=True)
class PrefixBench:
    """What is compared, and on what. `modes` None: all that differ on the model."""

    workloads: tuple[str, ...]
    modes: tuple[str, ...] | None
    checkpoint_policies: tuple[str, ...]
    eviction_policies: tuple[str, ...]
    sizes: Sizes
    concurrency: int
    """Requests at once, at most."""
    rounds: int

    def asks(self, vocab_size: int) -> dict[tuple[str, int], list[Ask]]:
        """By workload and number of round."""
        keys = product(self.workloads, range(self.rounds))
        return {(name, number): make_asks(name, self.sizes, vocab_size, number) for name, number in keys}


def prefix(settings: dict[str, Any], bench: PrefixBench, report: Callable[[str], None]) -> dict[str, Any]:
    """The report: for each workload and configuration what was found, and how soon the first tokens came.

    All configurations live in this process, have the same weights, and take turns: in each round a workload runs
    on one after another before the next workload does, beginning with another configuration each time. A round's
    prompts share nothing with those of other rounds, so it begins cold; what earlier rounds left stays cached
    until it is evicted.
    """
    given = EngineConfig(**settings)
    check_open(given)
    spec = load_spec(given)
    asks = bench.asks(spec.vocab_size)
    longest = max((ask for each in asks.values() for ask in each), key=lambda ask: ask.prompt_len + ask.output_len)
    config = with_room(settings, max_num_seqs=bench.concurrency, max_model_len=longest.prompt_len + longest.output_len)
    variants = choose_variants(
        bench.modes, bench.checkpoint_policies, bench.eviction_policies, spec, config.enable_chunked_prefill
    )
    configs = configs_of(variants, config, spec, detect(config.device))
    engines = _start(configs, longest, report)
    rounds = _take_turns(engines, bench, asks, report)
    baseline = find_baseline(variants, spec)
    results = []
    for name, variant in product(bench.workloads, variants):
        ours, theirs = rounds[name, variant], None if baseline is None else rounds[name, baseline]
        figures = prefix_figures(ours, theirs) | {"second_turn": second_turn_figures(ours, theirs)}
        results.append({"workload": name, "configuration": variant.name, **asdict(variant), **figures})
    plan = engines[variants[0]].plan
    common = {name: value for name, value in to_plain(plan.settings).items() if name not in COMPARED}
    return {
        "command": "prefix",
        "model": model_facts(config, plan),
        "settings": {**common, **asdict(bench.sizes), "concurrency": bench.concurrency, "rounds": bench.rounds},
        "machine": machine_facts(plan),
        "baseline": None if baseline is None else baseline.name,
        "configurations": [_cache_facts(variant, engine.plan) for variant, engine in engines.items()],
        "results": results,
    }


def _start(configs: dict[Variant, EngineConfig], longest: Ask, report: Callable[[str], None]) -> dict[Variant, Engine]:
    """An engine for each, after a request as long as the longest one."""
    from ostinato.engine.engine import Engine

    engines = {}
    for variant, config in configs.items():
        report(f"{variant.name}: loading and warming up")
        engine = engines[variant] = Engine(config)
        run_round(engine, [Ask(((0,) * longest.prompt_len,), longest.output_len)], concurrency=1, number=-1)
    return engines


def _take_turns(
    engines: dict[Variant, Engine],
    bench: PrefixBench,
    asks: dict[tuple[str, int], list[Ask]],
    report: Callable[[str], None],
) -> dict[tuple[str, Variant], list[Round]]:
    """All rounds, by workload and configuration."""
    rounds: dict[tuple[str, Variant], list[Round]] = {each: [] for each in product(bench.workloads, engines)}
    variants = list(engines)
    for number, name in product(range(bench.rounds), bench.workloads):
        first = number % len(variants)
        for variant in variants[first:] + variants[:first]:
            report(f"round {number + 1}: {name}, {variant.name}")
            rounds[name, variant].append(run_round(engines[variant], asks[name, number], bench.concurrency, number))
    return rounds


def _cache_facts(variant: Variant, plan: Plan) -> dict[str, Any]:
    """A configuration, and what its plan says of the cache."""
    memory = plan.memory
    return {
        "configuration": variant.name,
        **asdict(variant),
        "state_block_size": plan.settings.state_block_size,
        "cache_bytes": memory.cache,
        "blocks": memory.num_blocks,
        "slots": memory.num_slots,
        "checkpoints": memory.num_checkpoints,
        "prefix_tokens": memory.prefix_tokens,
    }
