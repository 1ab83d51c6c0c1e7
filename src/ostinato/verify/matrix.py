"""The matrix: what of it a model can do, and which of its ways are tried. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any, Literal, get_args

from ostinato.cache.placement import StateCacheMode
from ostinato.config import EngineConfig
from ostinato.errors import ConfigError, Remedy
from ostinato.models.checkpoint import load_spec
from ostinato.plan.device.detect import detect
from ostinato.plan.graphs.coverage import GraphMode
from ostinato.plan.limits import least_batched_tokens
from ostinato.plan.model import ModelSpec
from ostinato.plan.plan import make_plan
from ostinato.plan.speculation.drafter import available_methods
from ostinato.speculative_setting import Speculative
from ostinato.verify.settings import way_config

Choice = dict[str, Any]
"""Axis -> one of its values."""

Part = tuple[tuple[str, ...], tuple[Hashable, ...]]
"""A group of axes, and a value of each."""


def every_choice(axes: Mapping[str, Sequence[Hashable]], allowed: Callable[[Choice], bool]) -> list[Choice]:
    """All combinations of one value of each axis that are allowed, the last axis changing fastest."""
    rows = (dict(zip(axes, values, strict=True)) for values in product(*axes.values()))
    return [row for row in rows if allowed(row)]


def cover(
    choices: Sequence[Choice], groups: Collection[tuple[str, ...]], also: Collection[tuple[str, ...]] = ()
) -> list[Choice]:
    """A small part of `choices` in which, for each group of axes, all values occur together that do so anywhere.

    Greedy: the next one taken adds the most to that; of several, it adds the most to what `also` asks for besides, and
    is the first. Groups of two axes make a pairwise covering array, a group of one axis asks for each of its values.
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
    """What a choice has to show: each group with its values."""
    return frozenset((group, tuple(choice[axis] for axis in group)) for group in groups)


Extent = Literal["quick", "pairs", "full"]

DRAFTS = {"ngram": 4, "mtp": 3, "draft": 2}
"""Method -> k, where the user does not say; different ones, so that verify steps of several widths are seen."""

ENGINE_AXES = ("state_cache_mode", "speculative", "graph_mode", "max_num_batched_tokens", "overlap")
QUICK_GROUPS = (("state_cache_mode", "speculative"),)
"""Of `--quick`: its ways have every pair of these, and every value of the others."""


@dataclass(frozen=True)
class Way:
    """One way to compute: values of the axes that are settings of the engine, and whether requests are preempted."""

    state_cache_mode: StateCacheMode
    speculative: Speculative | None
    graph_mode: GraphMode
    max_num_batched_tokens: int
    overlap: Literal["off", "on"]
    preemption: bool

    @property
    def settings(self) -> dict[str, Any]:
        """Those of the engine."""
        return {axis: getattr(self, axis) for axis in ENGINE_AXES}

    def to_json(self) -> dict[str, Any]:
        return {**self.settings, "speculative": named(self.speculative), "preemption": self.preemption}


@dataclass(frozen=True)
class Matrix:
    """The axes, the ways that are tried, those of one engine side by side, and how many there would be in all.
    `left_out`: why others cannot be tried."""

    axes: dict[str, tuple[Any, ...]]
    ways: tuple[Way, ...]
    num_possible: int
    left_out: tuple[str, ...]


def named(speculative: Speculative | None) -> str | dict[str, Any]:
    """`none`, or what `speculative` would be given as."""
    return "none" if speculative is None else speculative.as_given()


def speculations(config: EngineConfig, model: ModelSpec, draft: str | None) -> tuple[Speculative | None, ...]:
    """The given one alone, or none and each that the model can do; `draft` is a draft model's checkpoint, in place of
    which the model drafts for itself."""
    if config.speculative is not None:
        if draft is not None:
            raise ConfigError("the speculation is given, so there is no other draft model; leave out one of them")
        return (config.speculative,)
    own = {"model": config.model if draft is None else draft}
    made = [
        Speculative(method=method, num_speculative_tokens=DRAFTS[method], **(own if method == "draft" else {}))
        for method in available_methods(model)
    ]
    return (None, *made)


def small_chunks(config: EngineConfig, most_drafts: int) -> tuple[int, ...]:
    """Values of `max_num_batched_tokens` that cut prompts: off every boundary, and on those of `state_block_size`;
    or the given one alone. None without chunked prefill."""
    rows, size = config.max_num_seqs, config.state_block_size
    assert rows is not None, "the base of all ways has it"
    assert size is not None, "the base of all ways has it"
    if config.max_num_batched_tokens is not None:
        return (config.max_num_batched_tokens,)
    if not config.enable_chunked_prefill:
        return ()
    least = least_batched_tokens(rows, 1 + most_drafts, config.block_size)
    odd = least + 1 if (least + 1) % config.block_size else least + 2
    return (odd, -(-(odd + 1) // size) * size)


def make_matrix(
    config: EngineConfig, methods: Sequence[Speculative | None], chunks: Sequence[int], extent: Extent
) -> Matrix:
    """The ways of an extent: all that can be planned, or of these a covering set of every pair of values, or of some
    pairs. ConfigError if there is none; CapacityError if one does not fit."""
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
        raise next(iter(refusals.values()))
    pairs = tuple(combinations(axes, 2))
    groups = {"quick": (*QUICK_GROUPS, *((axis,) for axis in axes)), "pairs": pairs, "full": (tuple(axes),)}[extent]
    ways = [Way(**choice) for choice in cover(possible, groups, also=tuple(combinations(axes, 3)))]
    ways.sort(key=lambda way: _place(way, axes))
    seen = {axis: tuple(dict.fromkeys(choice[axis] for choice in possible)) for axis in axes}
    return Matrix(seen, tuple(ways), len(possible), tuple(refusals))


def _spec(config: EngineConfig, method: Speculative | None) -> ModelSpec:
    """The model with what makes drafts. ConfigError about a draft model with a remedy that `verify` takes."""
    try:
        return load_spec(config.with_settings(speculative=method))
    except ConfigError as error:
        if method is None or method.method != "draft" or config.speculative is not None:
            raise
        raise ConfigError(error.message, [Remedy("draft", None)]) from None


def _place(way: Way, axes: Mapping[str, Sequence[Any]]) -> tuple[int, ...]:
    """Orders ways by their values, so that those of one engine stand together."""
    return tuple(values.index(getattr(way, axis)) for axis, values in axes.items())
