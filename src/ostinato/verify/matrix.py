"""The matrix: the ways that a model can take, and those that are tried. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any, Literal, get_args

from ostinato.config import EngineConfig
from ostinato.config_fields import Speculative
from ostinato.errors import ConfigError, Remedy
from ostinato.json_io import JsonObject
from ostinato.kv_cache.checkpoints import StateCacheMode
from ostinato.models.checkpoint import load_spec
from ostinato.plan.device.detect import detect
from ostinato.plan.graphs.coverage import GraphMode
from ostinato.plan.limits import min_batched_tokens
from ostinato.plan.model import ModelSpec
from ostinato.plan.plan import make_plan
from ostinato.plan.speculation import available_methods
from ostinato.verify.engine_configs import way_config

Choice = JsonObject
"""One value for each axis: axis -> value."""

Part = tuple[tuple[str, ...], tuple[Hashable, ...]]
"""A group of axes, and a value of each."""


def every_choice(axes: Mapping[str, Sequence[Hashable]], allowed: Callable[[Choice], bool]) -> list[Choice]:
    """Return all allowed combinations of one value of each axis, the last axis changing fastest."""
    rows = (dict(zip(axes, values, strict=True)) for values in product(*axes.values()))
    return [row for row in rows if allowed(row)]


def cover(
    choices: Sequence[Choice], groups: Collection[tuple[str, ...]], also: Collection[tuple[str, ...]] = ()
) -> list[Choice]:
    """Choose few of `choices` such that all values of each group of axes that occur together still do.

    Greedy: the next one taken adds the most combinations; of several, the one that adds the most to `also`, and then
    the first. Groups of two axes make a pairwise covering array, a group of one axis asks for each of its values.
    """
    parts, others = ([_parts(choice, each) for choice in choices] for each in (groups, also))
    missing, wanted = (frozenset[Part]().union(*each) for each in (parts, others))
    taken: list[Choice] = []
    while missing:
        best = max(range(len(choices)), key=lambda i: (len(parts[i] & missing), len(others[i] & wanted)))
        taken.append(choices[best])
        missing, wanted = missing - parts[best], wanted - others[best]
    return taken


def _parts(choice: Choice, groups: Collection[tuple[str, ...]]) -> frozenset[Part]:
    """Return the parts that a choice covers: each group with its values."""
    return frozenset((group, tuple(choice[axis] for axis in group)) for group in groups)


MatrixSize = Literal["quick", "pairs", "full"]

DRAFTS = {"ngram": 4, "mtp": 3, "draft": 2}
"""Method -> default k; they differ, so that verify steps of several widths occur."""

ENGINE_AXES = ("state_cache_mode", "speculative", "graph_mode", "max_num_batched_tokens", "overlap")
QUICK_GROUPS = (("state_cache_mode", "speculative"),)
"""Groups of `--quick`: its ways have every pair of these, and every value of the other axes."""


@dataclass(frozen=True)
class VerifyVariant:
    """One way to compute: values of the axes that are settings of the engine, and whether requests are preempted."""

    state_cache_mode: StateCacheMode
    speculative: Speculative | None
    graph_mode: GraphMode
    max_num_batched_tokens: int
    overlap: Literal["off", "on"]
    preemption: bool

    @property
    def settings(self) -> JsonObject:
        """Settings of the engine."""
        return {axis: getattr(self, axis) for axis in ENGINE_AXES}

    def to_json(self) -> JsonObject:
        return {**self.settings, "speculative": named(self.speculative), "preemption": self.preemption}


@dataclass(frozen=True)
class VerifyMatrix:
    """Axes, the ways that are tried, and the number of all possible ways.

    Ways of one engine are neighbours. `left_out` has the reasons why others cannot be tried.
    """

    axes: dict[str, tuple[Any, ...]]
    ways: tuple[VerifyVariant, ...]
    num_possible: int
    left_out: tuple[str, ...]


def named(speculative: Speculative | None) -> str | JsonObject:
    """Return `none`, or `speculative` in the form in which it is given."""
    return "none" if speculative is None else speculative.as_given()


def speculations(config: EngineConfig, model: ModelSpec, draft: str | None) -> tuple[Speculative | None, ...]:
    """Return the given speculation alone, or none and each that the model can do.

    `draft` is a draft model's checkpoint; without it the model drafts for itself, if it has no encoder.
    """
    if config.speculative is not None:
        if draft is not None:
            raise ConfigError("the speculation is given, so there is no other draft model; leave out one of them")
        return (config.speculative,)
    named_model = {"model": config.model if draft is None else draft}
    made = [
        Speculative(method=method, num_speculative_tokens=DRAFTS[method], **(named_model if method == "draft" else {}))
        for method in available_methods(model)
        if method != "draft" or can_draft(model, draft)
    ]
    return (None, *made)


def can_draft(model: ModelSpec, draft: str | None) -> bool:
    """Return whether there is a draft model: a given one, or the model itself, which must have no encoder."""
    return draft is not None or model.vision is None


def small_chunks(config: EngineConfig, most_drafts: int) -> tuple[int, ...]:
    """Return values of `max_num_batched_tokens` that split prompts, or the given one alone.

    One splits them off every boundary, one on those of `state_block_size`. Empty without chunked prefill.
    """
    rows, size = config.max_num_seqs, config.state_block_size
    assert rows is not None, "the base of all ways has it"
    assert size is not None, "the base of all ways has it"
    if config.max_num_batched_tokens is not None:
        return (config.max_num_batched_tokens,)
    if not config.enable_chunked_prefill:
        return ()
    least = min_batched_tokens(rows, 1 + most_drafts, config.block_size)
    odd = least + 1 if (least + 1) % config.block_size else least + 2
    return (odd, -(-(odd + 1) // size) * size)


def make_matrix(
    config: EngineConfig, methods: Sequence[Speculative | None], chunks: Sequence[int], extent: MatrixSize
) -> VerifyMatrix:
    """Return the ways of an extent: all that can be planned, or a covering set of them.

    The set covers every pair of values, or some pairs. ConfigError if no way can be planned; CapacityError if one does
    not fit.
    """
    axes: dict[str, tuple[Hashable, ...]] = {
        "state_cache_mode": get_args(StateCacheMode),
        "speculative": tuple(methods),
        "graph_mode": get_args(GraphMode),
        "max_num_batched_tokens": tuple(chunks),
        "overlap": ("off", "on"),
        "preemption": (False, True),
    }
    for axis in ("state_cache_mode", "graph_mode", "overlap"):
        if config.is_given(axis) and getattr(config, axis) != "auto":
            axes[axis] = (getattr(config, axis),)
    refusals: dict[str, ConfigError] = {}
    specs = {method: _spec(config, method) for method in methods}
    device = detect(config.device)

    def is_possible(choice: Choice) -> bool:
        asked = way_config(config, **{axis: choice[axis] for axis in ENGINE_AXES})
        try:
            settings = make_plan(asked, specs[choice["speculative"]], device).settings
        except ConfigError as error:
            refusals.setdefault(error.message, error)
            return False
        # Without state layers all modes are one, which has the name of the given one.
        return len(axes["state_cache_mode"]) == 1 or settings.state_cache_mode == choice["state_cache_mode"]

    possible = every_choice(axes, is_possible)
    if not possible:
        raise next(iter(refusals.values()), ConfigError(f"no way has {' and '.join(axes)} as given"))
    pairs = tuple(combinations(axes, 2))
    groups = {"quick": (*QUICK_GROUPS, *((axis,) for axis in axes)), "pairs": pairs, "full": (tuple(axes),)}[extent]
    ways = [VerifyVariant(**choice) for choice in cover(possible, groups, also=tuple(combinations(axes, 3)))]
    ways.sort(key=lambda way: _place(way, axes))
    seen = {axis: tuple(dict.fromkeys(choice[axis] for choice in possible)) for axis in axes}
    return VerifyMatrix(seen, tuple(ways), len(possible), tuple(refusals))


def _spec(config: EngineConfig, method: Speculative | None) -> ModelSpec:
    """Return the model with its drafter. ConfigError about a draft model has a remedy that `verify` takes."""
    try:
        return load_spec(config.with_settings(speculative=method))
    except ConfigError as error:
        if method is None or method.method != "draft" or config.speculative is not None:
            raise
        raise ConfigError(error.message, [Remedy("draft", None)]) from None


def _place(way: VerifyVariant, axes: Mapping[str, Sequence[object]]) -> tuple[int, ...]:
    """Return the sort key of a way, by its values, so that ways of one engine are neighbours."""
    return tuple(values.index(getattr(way, axis)) for axis, values in axes.items())
