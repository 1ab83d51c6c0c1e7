"""Speculation beside none: numbers of drafts, and the controller's own choice, by batch size, in one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from ostinato.bench.drive import run_batch, with_room
from ostinato.bench.facts import machine_facts, model_facts
from ostinato.bench.speculative_figures import Round, speculative_figures
from ostinato.bench.speculative_prompts import Prompts, SpeculativeBench, make_prompts
from ostinato.config import EngineConfig
from ostinato.errors import ConfigError, Remedy
from ostinato.models.checkpoint import load_spec
from ostinato.plain_data import to_plain
from ostinato.plan.speculation.speculative import available_methods

if TYPE_CHECKING:
    from ostinato.engine.engine import Engine


@dataclass(frozen=True)
class Variant:
    """One engine: k drafts in every step, or where the controller chooses them. `k` 0 is no speculation."""

    k: int
    is_adaptive: bool = False

    @property
    def name(self) -> str:
        return f"0 or {self.k}" if self.is_adaptive else str(self.k)

    def settings(self, method: str) -> dict[str, Any]:
        if self.k == 0:
            return {}
        return {"speculative": f"{method}:{self.k}", "speculative_adaptive": "on" if self.is_adaptive else "off"}


def speculative(settings: dict[str, Any], bench: SpeculativeBench, report: Callable[[str], None]) -> dict[str, Any]:
    """The report: for each batch size and number of drafts tokens per second, acceptance per position, and what a
    step costs.

    All engines live in this process, have the same weights, and take turns: in each round every one of them answers
    the same prompts, all handed over at once, beginning with another engine each time. The prefix cache is emptied
    before, so each computes its prompts.
    """
    for name in ("speculative", "speculative_adaptive"):
        if name in settings:
            raise ConfigError(f"{name} is what this benchmark compares; name drafts by --method and --num-drafts")
    _check_method(EngineConfig(**settings), bench.method)
    most = max(bench.num_drafts)
    prompts = make_prompts(EngineConfig(**settings), bench)
    longest = max(len(ids) for each in prompts.by_round.values() for ids in each)
    config = with_room(settings, max_num_seqs=max(bench.batch_sizes), max_model_len=longest + bench.output_len)
    variants = [Variant(k) for k in sorted({0, *bench.num_drafts})] + ([Variant(most, True)] if most else [])
    configs = {each: config.with_settings(**each.settings(bench.method)) for each in variants}
    engines = _start(configs, report)
    rounds = _take_turns(engines, bench, prompts, report)
    results = []
    for size, variant in product(bench.batch_sizes, variants):
        figures = speculative_figures(rounds[size, variant], rounds[size, Variant(0)], variant.k)
        results.append({"batch_size": size, "variant": variant.name, **asdict(variant), **figures})
    plan = engines[Variant(0)].plan
    speculation = engines[variants[-1]].stats()["speculation"]
    return {
        "command": "speculative",
        "model": model_facts(config, plan),
        "settings": {**to_plain(plan.settings), **asdict(bench), "prompts": prompts.source},
        "machine": machine_facts(plan),
        "results": results,
        "controller": None if speculation is None else speculation["controller"],
    }


def _check_method(config: EngineConfig, method: str) -> None:
    """ConfigError if the model has no head to draft with."""
    methods = available_methods(load_spec(config))
    if method == "mtp" and "mtp" not in methods:
        named = " or ".join({"draft": "draft:PATH"}.get(name, name) for name in methods)
        message = f"the model has no prediction head to measure; choose --method {named}"
        raise ConfigError(message, [Remedy("method", "ngram")])


def _start(configs: dict[Variant, EngineConfig], report: Callable[[str], None]) -> dict[Variant, Engine]:
    from ostinato.engine.engine import Engine

    engines = {}
    for variant, config in configs.items():
        report(f"{variant.name} drafts: loading the model and capturing its graphs")
        engines[variant] = Engine(config)
    return engines


def _take_turns(
    engines: dict[Variant, Engine], bench: SpeculativeBench, prompts: Prompts, report: Callable[[str], None]
) -> dict[tuple[int, Variant], list[Round]]:
    """All rounds, by batch size and variant. A round before them is not counted."""
    rounds: dict[tuple[int, Variant], list[Round]] = {each: [] for each in product(bench.batch_sizes, engines)}
    variants = list(engines)
    for number, size in product(range(-1, bench.rounds), bench.batch_sizes):
        first = number % len(variants)
        for variant in variants[first:] + variants[:first]:
            engine = engines[variant]
            report(f"{'warming up' if number < 0 else f'round {number + 1}'}: {size} rows, {variant.name} drafts")
            engine.reset_prefix_cache()
            before = _drafts(engine)
            ids = prompts.by_round[size, number]
            trace = run_batch(engine, ids, bench.output_len, ignore_eos=prompts.ignore_eos)
            if number >= 0:
                reached, accepted = (
                    tuple(now - then for now, then in zip(*each, strict=True))
                    for each in zip(_drafts(engine), before, strict=True)
                )
                rounds[size, variant].append(Round(trace, reached, accepted))
    return rounds


def _drafts(engine: Engine) -> tuple[Sequence[int], Sequence[int]]:
    """Drafts so far, per position: those whose predecessors were all kept, and of these those that were kept."""
    if engine.speculation is None:
        return (), ()
    counters = engine.speculation.counters
    return tuple(counters.reached), tuple(counters.accepted)
