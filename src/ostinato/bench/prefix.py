"""The prefix cache under several workloads, modes and policies, side by side in one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from ostinato.bench.drive import rotated_order, share_cache, with_room
from ostinato.bench.prefix_run import COUNTERS, PrefixRound, prefix_figures, run_round, second_turn_figures
from ostinato.bench.prefix_workloads import PromptRequest, Sizes, make_asks
from ostinato.bench.reports import Column, BenchReport, ProgressCallback, Table, engine_facts, engine_lines, spread_columns
from ostinato.config import EngineConfig
from ostinato.errors import ConfigError
from ostinato.models.checkpoint import load_spec
from ostinato.plan.device.catalogue import DeviceSpec
from ostinato.plan.device.detect import detect
from ostinato.plan.model import ModelSpec
from ostinato.plan.plan import Plan, make_plan

if TYPE_CHECKING:
    from ostinato.engine.engine import EngineCore


MODES = ("off", "none", "align", "all")
"""`off` is without prefix caching; the others are values of `state_cache_mode`."""

COMPARED = {
    "enable_prefix_caching": "--modes",
    "state_cache_mode": "--modes",
    "checkpoint_policy": "--checkpoint-policies",
    "eviction_policy": "--eviction-policies",
}
"""Compared engine settings -> the option that names their values."""
CONFIGURATIONS = (
    Column("configuration", "configuration"),
    Column("eviction", "eviction_policy"),
    Column("spacing", lambda each: each["state_block_size"] if each["mode"] in ("align", "all") else None),
    Column("cache", "cache_bytes", "bytes"),
    *(Column(name, name, "count") for name in ("blocks", "slots", "checkpoints")),
)


@dataclass(frozen=True)
class CacheVariant:
    """One configuration of the cache. A policy that makes no difference in it is None."""

    mode: str
    checkpoint_policy: str | None = None
    eviction_policy: str | None = None

    @property
    def name(self) -> str:
        """Name for people; it leaves out the default eviction policy."""
        branches = "+branches" if self.checkpoint_policy == "boundaries+branches" else ""
        return f"{self.mode}{branches}{', lru' if self.eviction_policy == 'lru' else ''}"

    def apply(self, config: EngineConfig) -> EngineConfig:
        if self.mode == "off":
            return config.with_settings(enable_prefix_caching=False)
        policies = {name: value for name, value in asdict(self).items() if name != "mode" and value is not None}
        return config.with_settings(state_cache_mode=self.mode, **policies)


@dataclass(frozen=True)
class PrefixBench:
    """The compared configurations and workloads. `modes` None: all that differ on the model."""

    workloads: tuple[str, ...]
    modes: tuple[str, ...] | None
    checkpoint_policies: tuple[str, ...]
    eviction_policies: tuple[str, ...]
    sizes: Sizes
    concurrency: int
    """Most requests at once."""
    rounds: int

    def asks(self, vocab_size: int) -> dict[tuple[str, int], list[PromptRequest]]:
        """Return the asks by workload and number of the round."""
        keys = product(self.workloads, range(self.rounds))
        return {(name, number): make_asks(name, self.sizes, vocab_size, number) for name, number in keys}


def prefix(settings: dict[str, Any], bench: PrefixBench, say: ProgressCallback) -> BenchReport:
    """Measure cache hits and times to first token for each workload and configuration.

    All configurations are in this process, have the same weights, and alternate: in each round a workload runs on one
    after another before the next workload does, beginning with another configuration each time. A round's prompts share
    nothing with those of other rounds, so it begins cold; entries of earlier rounds stay cached until they are evicted.
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
    engines = _start(configs, longest, say)
    rounds = _take_turns(engines, bench, asks, say)
    baseline = find_baseline(variants, spec)
    results = []
    for name, variant in product(bench.workloads, variants):
        ours, theirs = rounds[name, variant], None if baseline is None else rounds[name, baseline]
        figures = prefix_figures(ours, theirs) | {"second_turn": second_turn_figures(ours, theirs)}
        results.append({"workload": name, "configuration": variant.name, **asdict(variant), **figures})
    plan = engines[variants[0]].plan
    data = engine_facts(
        "prefix", config, plan, **asdict(bench.sizes), concurrency=bench.concurrency, rounds=bench.rounds
    )
    data["settings"] = {name: value for name, value in data["settings"].items() if name not in COMPARED}
    data["baseline"] = None if baseline is None else baseline.name
    data["configurations"] = [_cache_facts(variant, engine.plan) for variant, engine in engines.items()]
    data["results"] = results
    workload = "{shared_len} shared tokens, about {new_len} new, {output_len} of output, {concurrency} at once"
    return BenchReport(data, engine_lines(data, workload), prefix_tables(data))


def _start(configs: dict[CacheVariant, EngineConfig], longest: PromptRequest, say: ProgressCallback) -> dict[CacheVariant, EngineCore]:
    """Start an engine for each configuration, and run a request as long as the longest one."""
    from ostinato.engine.engine import EngineCore

    engines = {}
    for variant, config in configs.items():
        say(f"{variant.name}: loading and warming up")
        engine = engines[variant] = EngineCore(config)
        run_round(engine, [PromptRequest(((0,) * longest.prompt_len,), longest.output_len)], concurrency=1, number=-1)
    return engines


def _take_turns(
    engines: dict[CacheVariant, EngineCore],
    bench: PrefixBench,
    asks: dict[tuple[str, int], list[PromptRequest]],
    say: ProgressCallback,
) -> dict[tuple[str, CacheVariant], list[PrefixRound]]:
    """Run all rounds; return them by workload and configuration."""
    rounds: dict[tuple[str, CacheVariant], list[PrefixRound]] = {each: [] for each in product(bench.workloads, engines)}
    variants = list(engines)
    for number, name in product(range(bench.rounds), bench.workloads):
        for variant in rotated_order(variants, number):
            say(f"round {number + 1}: {name}, {variant.name}")
            rounds[name, variant].append(run_round(engines[variant], asks[name, number], bench.concurrency, number))
    return rounds


def _cache_facts(variant: CacheVariant, plan: Plan) -> dict[str, Any]:
    """Return a configuration, and its plan's facts about the cache."""
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


def choose_variants(
    modes: Sequence[str] | None,
    checkpoint_policies: Sequence[str],
    eviction_policies: Sequence[str],
    model: ModelSpec,
    chunked_prefill: bool,
) -> list[CacheVariant]:
    """Return each mode with each policy that matters in it, once. `modes` None: all that differ on this model.

    Without state layers there are no checkpoints, so all modes but `off` are one, which is called `none`. With them
    nothing is found again in mode `none`, which leaves no policy to compare.
    """
    chosen: list[CacheVariant] = []
    for mode in modes or _possible_modes(model, chunked_prefill):
        if mode == "off" or (mode == "none" and model.keeps_state):
            chosen.append(CacheVariant(mode))
        elif model.keeps_state:
            chosen += [CacheVariant(mode, *policies) for policies in product(checkpoint_policies, eviction_policies)]
        else:
            chosen += [CacheVariant("none", None, eviction) for eviction in eviction_policies]
    return list(dict.fromkeys(chosen))


def find_baseline(variants: Sequence[CacheVariant], model: ModelSpec) -> CacheVariant | None:
    """Return the first variant that finds nothing; None if all may find something.

    It is `off`, or `none` on a model with state layers.
    """
    blind = ("off", "none") if model.keeps_state else ("off",)
    return next((variant for variant in variants if variant.mode in blind), None)


def check_open(config: EngineConfig) -> None:
    """Raise ConfigError if a setting that is compared is given as well."""
    for name, option in COMPARED.items():
        if config.is_given(name):
            raise ConfigError(f"{name} is what the benchmark compares; leave it out and give {option}")


def configs_of(
    variants: Sequence[CacheVariant], config: EngineConfig, model: ModelSpec, device: DeviceSpec
) -> dict[CacheVariant, EngineConfig]:
    """Return the settings of each variant, which share an open `cache_memory`.

    Raises CapacityError if that is too little.
    """
    configs = {variant: variant.apply(config) for variant in variants}
    return share_cache(configs, lambda each: make_plan(each, model, device))


def _possible_modes(model: ModelSpec, chunked_prefill: bool) -> list[str]:
    if not model.keeps_state:
        return ["off", "none"]
    modes = ["none"]
    if chunked_prefill:
        modes.append("align")
    if model.supports_all_checkpoints:
        modes.append("all")
    return modes


def prefix_tables(data: Mapping[str, Any]) -> list[Table]:
    results, baseline = data["results"], data["baseline"]
    names = (Column("workload", "workload", is_text=True), Column("configuration", "configuration", is_text=True))
    ratio = "ratio" if baseline is None else f"to {baseline}"
    first_tokens = (
        Column("hit rate", "hit_rate", "{:.1%}"),
        Column("first token", "time_to_first_token.mean", "ms"),
        Column("p50", "time_to_first_token.p50", "ms"),
        Column("p99", "time_to_first_token.p99", "ms"),
        Column(ratio, "first_token_ratio.median", "{:,.2f}"),
    )
    tokens = (
        Column("prompts", "prompt_tokens", "count"),
        Column("cached", "cached_tokens", "count"),
        Column("missed", "misses", _misses, is_text=True),
    )
    headings = ("checkpoints taken", "not taken", "evicted", "blocks evicted", "preemptions")
    counters = [Column(heading, name, "count") for heading, name in zip(headings, COUNTERS, strict=True)]
    tables = [Table(CONFIGURATIONS, data["configurations"])]
    tables += [Table((*names, *columns), results) for columns in (first_tokens, tokens, counters)]
    second_turns = [result for result in results if result["second_turn"] is not None]
    if second_turns:
        columns = (
            Column("second turn", "configuration"),
            Column("cold", "second_turn.cold_seconds.median", "ms"),
            Column("warm", "second_turn.warm_seconds.median", "ms"),
            Column("sooner", "second_turn.speedup.median", "{:,.1f}x"),
            *spread_columns("second_turn.speedup", "{:,.1f}x", "min", "max"),
            Column(f"cold {ratio}", "second_turn.cold_ratio.median", "{:,.2f}"),
        )
        tables.append(Table(columns, second_turns))
    return tables


def _misses(misses: Mapping[str, int]) -> str:
    return ", ".join(f"{tokens:,} {cause.replace('_', ' ')}" for cause, tokens in misses.items())
