"""Speculation compared with none: numbers of drafts, and the controller's own choice, by batch size, in one run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING

from ostinato.bench.engine_driver import Workload, rotated_order, run_batch, with_room
from ostinato.bench.profile import Roofline
from ostinato.bench.report import BenchReport, Column, ProgressCallback, Table, engine_facts, engine_lines
from ostinato.bench.roofline import measure_bandwidth, measure_flops
from ostinato.bench.statistics import RoundTrace, paired_ratio, spread
from ostinato.config import EngineConfig
from ostinato.demo.problems import held_out
from ostinato.errors import ConfigError, Remedy, os_error_text
from ostinato.files import full_lines, read_text
from ostinato.json_io import JsonMapping, JsonObject
from ostinato.models.checkpoint import checkpoint_of, load_spec
from ostinato.ops.kernel_cost import StepShape
from ostinato.plan.kernel_costs import kernel_work
from ostinato.plan.plan import Plan
from ostinato.plan.speculation import available_methods

if TYPE_CHECKING:
    from ostinato.engine.core import EngineCore


CONTROLLER = (
    Column("rows", lambda each: " to ".join(map(str, dict.fromkeys(each["rows"])))),
    Column("choice", "choice", "{:,.0f} drafts"),
    Column("ground", "ground", is_text=True),
)


@dataclass(frozen=True)
class SpeculativeBench:
    """The compared variants: each of `num_drafts` (0: no speculation) without the controller, and the largest with it.

    `method` is the part of `speculative` before the number: `mtp`, `ngram` or `draft:PATH`. Prompts are the lines of
    `prompts`, else word problems for the embedded model, else `prompt_len` random tokens. With `accept`, drafts are
    right with that probability. They replace the method's own drafts, whose time is taken all the same.
    """

    method: str
    num_drafts: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    prompt_len: int
    output_len: int
    rounds: int
    prompts: Path | None = None
    accept: float | None = None


@dataclass(frozen=True)
class Prompts:
    """Prompts of a run: token ids by batch size and number of the round, -1 being the one to warm up.

    They also record their source, and whether end tokens are ignored, which they are if the prompts say nothing.
    """

    by_round: dict[tuple[int, int], list[list[int]]]
    source: str
    ignore_eos: bool


@dataclass(frozen=True)
class DraftVariant:
    """One engine: k drafts in every step, or as many as the controller selects. `k` 0 is no speculation."""

    k: int
    is_adaptive: bool = False

    @property
    def name(self) -> str:
        return f"0 to {self.k}" if self.is_adaptive else str(self.k)

    def settings(self, method: str) -> JsonObject:
        if self.k == 0:
            return {}
        return {"speculative": f"{method}:{self.k}", "speculative_adaptive": "on" if self.is_adaptive else "off"}


@dataclass(frozen=True)
class DraftRound:
    """One round, with its drafts per position; `()` without speculation.

    Drafts are counted if all predecessors were accepted, and of these those that were accepted too.
    """

    trace: RoundTrace
    reached: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()


def speculative(settings: JsonObject, bench: SpeculativeBench, say: ProgressCallback) -> BenchReport:
    """Measure tokens per second, acceptance per position and step costs, by batch size and number of drafts.

    All engines are in this process, have the same weights, and alternate: in each round every one of them answers the
    same prompts, all added at once, beginning with another engine each time. The prefix cache is emptied before, so
    each computes its prompts.
    """
    for name in ("speculative", "speculative_adaptive"):
        if name in settings:
            raise ConfigError(f"{name} is what this benchmark compares; name drafts by --method and --num-drafts")
    _check_method(EngineConfig(**settings), bench.method)
    most = max(bench.num_drafts)
    prompts = make_prompts(EngineConfig(**settings), bench)
    lengths = [len(ids) for each in prompts.by_round.values() for ids in each]
    needed = {"max_num_seqs": max(bench.batch_sizes), "max_model_len": max(lengths) + bench.output_len}
    config = with_room(settings, **needed)
    variants = [DraftVariant(k) for k in sorted({0, *bench.num_drafts})] + ([DraftVariant(most, True)] if most else [])
    configs = {key: config.with_settings(**key.settings(bench.method)) for key in variants}
    engines = _start(configs, bench.accept, say)
    rounds = _take_turns(engines, bench, prompts, say)
    roofs = _roofs(engines[DraftVariant(0)], say)
    plan = engines[DraftVariant(0)].plan
    context = round(statistics.mean(lengths) + bench.output_len / 2)
    results = []
    for size, variant in product(bench.batch_sizes, variants):
        figures = speculative_figures(rounds[size, variant], rounds[size, DraftVariant(0)], variant.k)
        floor = None if variant.is_adaptive else verify_floor(config, plan, roofs, size, variant.k, context)
        figures |= {"floor_milliseconds": floor and 1e3 * floor}
        results.append({"batch_size": size, "variant": variant.name, **asdict(variant), **figures})
    speculation = engines[variants[-1]].stats()["speculation"]
    data = {
        **engine_facts("speculative", config, plan, **asdict(bench) | {"prompts": prompts.source}),
        "results": results,
        "controller": None if speculation is None else speculation["controller"],
    }
    return BenchReport(data, engine_lines(data, "{prompts}, up to {output_len} new tokens"), speculative_tables(data))


def _check_method(config: EngineConfig, method: str) -> None:
    """Raise ConfigError if the model has no head to draft with."""
    methods = available_methods(load_spec(config))
    if method == "mtp" and "mtp" not in methods:
        named = " or ".join({"draft": "draft:PATH"}.get(name, name) for name in methods)
        message = f"the model has no prediction head to measure; choose --method {named}"
        raise ConfigError(message, [Remedy("method", "ngram")])


def _start(
    configs: dict[DraftVariant, EngineConfig], accept: float | None, say: ProgressCallback
) -> dict[DraftVariant, EngineCore]:
    from ostinato.engine.core import EngineCore
    from ostinato.runner.draft_override import SyntheticDrafts, override_drafts

    engines = {}
    for variant, config in configs.items():
        say(f"{variant.name} drafts: loading the model and capturing its graphs")
        engine = engines[variant] = EngineCore(config)
        if accept is not None:
            override_drafts(engine.runner, SyntheticDrafts(accept, engine.spec.vocab_size))
    return engines


def _roofs(engine: EngineCore, say: ProgressCallback) -> Roofline | None:
    """Measure the machine's roofline; return None on a GPU, whose matmul rate is not measured."""
    plan = engine.plan
    if plan.device.kind != "cpu":
        return None
    say("measuring the memory's bandwidth and the rate of matrix products")
    bandwidth = measure_bandwidth(engine.runner.arrays.device, isa=plan.device.native.isa)
    return Roofline(bandwidth.best, measure_flops(plan.settings.dtype))


def _take_turns(
    engines: dict[DraftVariant, EngineCore], bench: SpeculativeBench, prompts: Prompts, say: ProgressCallback
) -> dict[tuple[int, DraftVariant], list[DraftRound]]:
    """Run all rounds; return them by batch size and variant. A round before them is not counted."""
    rounds: dict[tuple[int, DraftVariant], list[DraftRound]] = {
        each: [] for each in product(bench.batch_sizes, engines)
    }
    variants = list(engines)
    for number, size in product(range(-1, bench.rounds), bench.batch_sizes):
        for variant in rotated_order(variants, number):
            engine = engines[variant]
            say(f"{'warming up' if number < 0 else f'round {number + 1}'}: {size} rows, {variant.name} drafts")
            engine.reset_prefix_cache()
            before = _drafts(engine)
            ids = prompts.by_round[size, number]
            is_forced = bench.accept is not None
            trace = run_batch(engine, ids, bench.output_len, ignore_eos=prompts.ignore_eos, is_forced=is_forced)
            if number >= 0:
                reached, accepted = (
                    tuple(now - then for now, then in zip(*each, strict=True))
                    for each in zip(_drafts(engine), before, strict=True)
                )
                rounds[size, variant].append(DraftRound(trace, reached, accepted))
    return rounds


def _drafts(engine: EngineCore) -> tuple[Sequence[int], Sequence[int]]:
    """Return the drafts so far, per position: those with all predecessors accepted, and of these those accepted too."""
    if engine.speculation is None:
        return (), ()
    counters = engine.speculation.counters
    return tuple(counters.reached), tuple(counters.accepted)


def make_prompts(config: EngineConfig, bench: SpeculativeBench) -> Prompts:
    """Return the prompts of all rounds, each used once if there are enough. ConfigError for a file without prompts."""
    keys = list(product(bench.batch_sizes, range(-1, bench.rounds)))
    if bench.prompts is None and config.model != "demo":
        vocab_size = load_spec(config).vocab_size
        workload = Workload(bench.prompt_len, bench.output_len, bench.batch_sizes, bench.rounds)
        by_round = {(size, number): workload.prompts(size, vocab_size, number) for size, number in keys}
        return Prompts(by_round, f"{bench.prompt_len} random tokens", True)
    if bench.prompts is None:
        texts = [f"Q: {problem.question}\nA:" for problem in held_out(0, sum(size for size, _ in keys))]
    else:
        texts = _lines(bench.prompts)
    from ostinato.engine.text.tokenizer import load_tokenizer_and_template

    tokenizer, _ = load_tokenizer_and_template(config, checkpoint_of(config))
    ids = [tokenizer.encode(text) for text in texts]
    taken: dict[tuple[int, int], list[list[int]]] = {}
    first = 0
    for size, number in keys:
        taken[size, number] = [ids[(first + i) % len(ids)] for i in range(size)]
        first += size
    return Prompts(taken, "word problems" if bench.prompts is None else str(bench.prompts), False)


def _lines(path: Path) -> list[str]:
    try:
        lines = full_lines(read_text(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {os_error_text(error)}") from None
    if not lines:
        raise ConfigError(f"{path} holds no prompts, one per line")
    return lines


def speculative_figures(rounds: Sequence[DraftRound], plain: Sequence[DraftRound], k: int) -> JsonObject:
    """Return statistics of one variant with `k` drafts against `plain`, without drafts, on the same prompts.

    `decode_tokens_per_second` is the median, least and greatest over the rounds; `speed` that of a round over that of
    the same round without drafts, and `total_speed` the same of all output tokens over the whole round, prefill
    included. `acceptance` is by position: of the drafts there whose predecessors were all accepted, those that were
    accepted. `tokens_per_step` is the mean number of output tokens of a row with drafts. `step_milliseconds` is the
    median length of decode steps before any request ended, and `step_cost` that in steps without drafts.
    `equal_outputs` is the part of the outputs whose tokens are those without drafts.
    """
    written = [
        pair
        for one, other in zip(rounds, plain, strict=True)
        for pair in zip(one.trace.outputs, other.trace.outputs, strict=True)
    ]
    rates, plain_rates = ([round_.trace.decode_rate for round_ in given] for given in (rounds, plain))
    totals, plain_totals = ([_total_rate(round_) for round_ in given] for given in (rounds, plain))
    reached, accepted = (_sum([getattr(round_, name) for round_ in rounds], k) for name in ("reached", "accepted"))
    seconds, plain_seconds = (statistics.median(_full_steps(each)) for each in (rounds, plain))
    return {
        "decode_tokens_per_second": spread(rates),
        "speed": paired_ratio(rates, plain_rates),
        "total_speed": paired_ratio(totals, plain_totals),
        "acceptance": [kept / count if count else None for kept, count in zip(accepted, reached, strict=True)],
        "tokens_per_step": 1 + sum(accepted) / reached[0] if any(reached) else 1.0,
        "step_milliseconds": 1e3 * seconds,
        "step_cost": seconds / plain_seconds,
        "output_tokens": sum(round_.trace.output_tokens for round_ in rounds),
        "equal_outputs": sum(own == other for own, other in written) / len(written) if written else None,
    }


def verify_floor(
    config: EngineConfig, plan: Plan, roofs: Roofline | None, rows: int, num_drafts: int, context: int
) -> float | None:
    """Return the roofline seconds of the model's part in a step with `num_drafts` drafts per row.

    They are each kernel's bytes over the bandwidth or operations over the matmul rate, whichever takes longer; the
    drafter's time comes on top. None for a model with experts, since a step reads those that its tokens select, and if
    `roofs` are not known.
    """
    if roofs is None:
        return None
    shape = StepShape(rows, 1 + num_drafts, context, decodes=True)
    settings = plan.settings
    dtypes = (settings.dtype, settings.ssm_state_dtype)
    works = kernel_work(load_spec(config), *dtypes, shape, settings.kv_cache_dtype).values()
    return None if None in works else sum(roofs.floor(work) for work in works if work is not None)


def _full_steps(rounds: Sequence[DraftRound]) -> list[float]:
    """Return the lengths in seconds of the decode steps in which no request had ended."""
    lengths = []
    for round_ in rounds:
        trace = round_.trace
        first_end = min(times[-1] for times in trace.token_times)
        steps = pairwise(trace.step_ends)
        lengths += [end - begin for begin, end in steps if trace.prefill_end < end <= first_end]
    return lengths or [length for round_ in rounds for length in round_.trace.decode_step_seconds]


def _total_rate(one: DraftRound) -> float:
    return one.trace.output_tokens / one.trace.end


def _sum(counts: Sequence[Sequence[int]], k: int) -> list[int]:
    return [sum(count[i] for count in counts if count) for i in range(k)]


def speculative_tables(data: JsonMapping) -> list[Table]:
    names = (Column("batch", "batch_size"), Column("drafts", "variant"))
    two = "{:,.2f}"
    speeds = (
        Column("tokens/s", "decode_tokens_per_second.median", "count"),
        Column("speed", "speed.median", two),
        Column("in all", "total_speed.median", two, help="as speed, prefill included"),
        Column("equal", "equal_outputs", "{:.0%}", help="outputs with the tokens that they have without drafts"),
    )
    steps = (
        Column("step ms", "step_milliseconds", two),
        Column("cost", "step_cost", two, help="of a step, in steps without drafts"),
        Column("floor ms", "floor_milliseconds", two, help="of the model's part; what makes drafts comes on top"),
        Column("tokens/step", "tokens_per_step", two),
        Column("acceptance", _acceptance, help="of the drafts at each position whose predecessors were all kept"),
    )
    tables = [Table((*names, *speeds), data["results"]), Table((*names, *steps), data["results"])]
    if data["controller"] is not None:
        tables.append(Table(CONTROLLER, data["controller"]["batch_sizes"], "drafts by batch size"))
    return tables


def _acceptance(result: JsonMapping) -> str:
    return " ".join("-" if share is None else f"{share:.2f}" for share in result["acceptance"]) or "-"
