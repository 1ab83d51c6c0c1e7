"""Benchmark of the prefix cache: several workloads, modes and policies, side by side in one run.

It sends a workload's requests to an engine, a few at a time, and makes statistics of the results.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import TYPE_CHECKING

from ostinato.bench.engine_driver import rotated_order, share_cache, with_room
from ostinato.bench.prefix_workloads import PromptRequest, Sizes, make_asks
from ostinato.bench.report import (
    BenchReport,
    Column,
    ProgressCallback,
    Table,
    engine_facts,
    engine_lines,
    spread_columns,
)
from ostinato.bench.statistics import paired_ratio, percentiles, spread
from ostinato.config import EngineConfig
from ostinato.errors import ConfigError
from ostinato.json_io import JsonMapping, JsonObject
from ostinato.kv_cache.marks import Mark
from ostinato.kv_cache.prefix_index import MissCause
from ostinato.models.checkpoint import load_spec
from ostinato.plan.device.detect import detect
from ostinato.plan.device.gpu_catalogue import DeviceSpec
from ostinato.plan.model import ModelSpec
from ostinato.plan.plan import Plan, make_plan

if TYPE_CHECKING:
    from ostinato.engine.core import EngineCore
    from ostinato.engine.outputs import RequestOutput


COUNTERS = ("checkpoints_taken", "checkpoints_not_taken", "evicted_checkpoints", "evicted_blocks", "preemptions")
"""Counters of the engine's statistics that are reported per round."""


@dataclass(frozen=True)
class AskResult:
    """Result of one ask. `misses` are tokens by cause; with the cached ones they add up to the prompt."""

    role: str
    prompt_tokens: int
    cached_tokens: int
    misses: dict[str, int]
    first_token_seconds: float
    """Seconds to the first token from its arrival, which is when it was asked."""


@dataclass(frozen=True)
class PrefixRound:
    """All asks of a workload, served once; `counters` are the changes meanwhile."""

    served: tuple[AskResult, ...]
    counters: dict[str, int]

    def of_role(self, role: str) -> list[AskResult]:
        return [ask for ask in self.served if ask.role == role]


def run_round(engine: EngineCore, asks: Sequence[PromptRequest], concurrency: int, number: int) -> PrefixRound:
    """Serve `asks`, at most `concurrency` of them at once: the first in order whose predecessor is done comes next.

    Asks of role `cold` get a cache salt of round `number`, so they find nothing that others have left.
    """
    before = _counters(engine)
    waiting = list(range(len(asks)))
    running: dict[str, int] = {}
    done: dict[int, RequestOutput] = {}
    answers: dict[int, list[int]] = {}
    while waiting or running:
        ready = [index for index in waiting if asks[index].after is None or asks[index].after in done]
        for index in ready[: concurrency - len(running)]:
            waiting.remove(index)
            running[_add(engine, asks[index], answers, number)] = index
        for output in engine.step():
            if output.error is not None:
                raise output.error
            if output.finished:
                index = running.pop(output.request_id)
                done[index], answers[index] = output, output.outputs[0].token_ids
    served = tuple(_served(ask, done[index]) for index, ask in enumerate(asks))
    after = _counters(engine)
    return PrefixRound(served, {name: after[name] - before[name] for name in after})


def _add(engine: EngineCore, ask: PromptRequest, answers: dict[int, list[int]], number: int) -> str:
    from ostinato.sampling.params import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=ask.output_len, ignore_eos=True)
    salt = f"cold {number}" if ask.role == "cold" else None
    # Where nothing is kept, marks are refused.
    marks = [Mark(position) for position in ask.marks if engine.plan.hit_law.min_shared]
    return engine.add_request(ask.prompt(answers), params, cache_salt=salt, marks=marks)


def _served(ask: PromptRequest, output: RequestOutput) -> AskResult:
    times, cache = output.times, output.cache
    assert times.first_token is not None, "a finished request has its first token"
    assert cache is not None, "a finished request knows what it found in the cache"
    return AskResult(
        role=ask.role,
        prompt_tokens=len(output.prompt_token_ids),
        cached_tokens=cache.cached_tokens,
        misses=dict(cache.misses),
        first_token_seconds=times.first_token - times.arrival,
    )


def _counters(engine: EngineCore) -> dict[str, int]:
    stats = engine.stats()
    return {name: (stats | stats["prefix_cache"])[name] for name in COUNTERS}


def prefix_figures(rounds: Sequence[PrefixRound], baseline: Sequence[PrefixRound] | None) -> JsonObject:
    """Return tokens found and missed, and seconds to the first token, over the counted asks of all rounds.

    `baseline` are the same rounds in a configuration that finds nothing; `first_token_ratio` is the mean time over
    theirs, round by round. None without a baseline.
    """
    served = [ask for one in rounds for ask in one.of_role("counted")]
    seconds = [ask.first_token_seconds for ask in served]
    prompt_tokens = sum(ask.prompt_tokens for ask in served)
    cached_tokens = sum(ask.cached_tokens for ask in served)
    misses: Counter[str] = Counter()
    counters: Counter[str] = Counter()
    for ask in served:
        misses.update(ask.misses)
    for one in rounds:
        counters.update(one.counters)
    times, theirs = percentiles(seconds), None if baseline is None else _counted_seconds(baseline)
    return {
        "requests": len(served),
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached_tokens,
        "hit_rate": cached_tokens / prompt_tokens,
        "misses": {cause.value: misses[cause.value] for cause in MissCause if misses[cause.value]},
        "time_to_first_token": times and {"mean": statistics.mean(seconds), **times},
        "first_token_ratio": paired_ratio(_counted_seconds(rounds), theirs),
        **counters,
        "rounds": [_round_figures(one) for one in rounds],
    }


def second_turn_figures(rounds: Sequence[PrefixRound], baseline: Sequence[PrefixRound] | None) -> JsonObject | None:
    """Return the seconds to the first token of one prompt, cold and warm, and the ratio of both.

    Return None for a workload without cold asks. `cold_ratio` is the cold time over that of the baseline: the cost of
    filling the cache.
    """
    if not rounds[0].of_role("cold"):
        return None
    cold, warm = _cold_seconds(rounds), _counted_seconds(rounds)
    return {
        "cold_seconds": spread(cold),
        "warm_seconds": spread(warm),
        "speedup": paired_ratio(cold, warm),
        "cold_ratio": paired_ratio(cold, None if baseline is None else _cold_seconds(baseline)),
    }


def marks_figures(rounds: Sequence[PrefixRound]) -> JsonObject | None:
    """Return seconds to the first token and computed tokens, with marks and without; None for a workload without."""
    unmarked, marked = ([each for one in rounds for each in one.of_role(role)] for role in ("unmarked", "counted"))
    if not unmarked:
        return None
    seconds = [[each.first_token_seconds for each in served] for served in (unmarked, marked)]
    computed = [sum(each.prompt_tokens - each.cached_tokens for each in served) for served in (unmarked, marked)]
    return {
        "unmarked_seconds": spread(seconds[0]),
        "marked_seconds": spread(seconds[1]),
        "speedup": paired_ratio(*seconds),
        "unmarked_computed_tokens": computed[0],
        "marked_computed_tokens": computed[1],
    }


def _counted_seconds(rounds: Sequence[PrefixRound]) -> list[float]:
    """Return the mean time to the first token of each round's counted asks."""
    return [statistics.mean(ask.first_token_seconds for ask in one.of_role("counted")) for one in rounds]


def _cold_seconds(rounds: Sequence[PrefixRound]) -> list[float]:
    return [statistics.mean(ask.first_token_seconds for ask in one.of_role("cold")) for one in rounds]


def _round_figures(one: PrefixRound) -> JsonObject:
    counted = one.of_role("counted")
    return {
        "cached_tokens": sum(ask.cached_tokens for ask in counted),
        "first_token_seconds": [ask.first_token_seconds for ask in counted],
        "cold_first_token_seconds": [ask.first_token_seconds for ask in one.of_role("cold")],
        **one.counters,
    }


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


def prefix(settings: JsonObject, bench: PrefixBench, say: ProgressCallback) -> BenchReport:
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
        figures["marks"] = marks_figures(ours)
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


def _start(
    configs: dict[CacheVariant, EngineConfig], longest: PromptRequest, say: ProgressCallback
) -> dict[CacheVariant, EngineCore]:
    """Start an engine for each configuration, and run a request as long as the longest one."""
    from ostinato.engine.core import EngineCore

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


def _cache_facts(variant: CacheVariant, plan: Plan) -> JsonObject:
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
    """Return each variant's settings, which share an open `cache_memory`. CapacityError if that is too little."""
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


def prefix_tables(data: JsonMapping) -> list[Table]:
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
    marked = [result for result in results if result["marks"] is not None]
    if marked:
        columns = (
            Column("rewritten history", "configuration"),
            Column("without marks", "marks.unmarked_seconds.median", "ms"),
            Column("with marks", "marks.marked_seconds.median", "ms"),
            Column("sooner", "marks.speedup.median", "{:,.1f}x"),
            *spread_columns("marks.speedup", "{:,.1f}x", "min", "max"),
            Column("computed without", "marks.unmarked_computed_tokens", "count"),
            Column("with", "marks.marked_computed_tokens", "count"),
        )
        tables.append(Table(columns, marked))
    return tables


def _misses(misses: Mapping[str, int]) -> str:
    return ", ".join(f"{tokens:,} {cause.replace('_', ' ')}" for cause, tokens in misses.items())
