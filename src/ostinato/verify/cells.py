"""The cells of the matrix: each way cold and warm, compared with the plain path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from ostinato.config import EngineConfig
from ostinato.engine.core import EngineCore
from ostinato.engine.outputs import RequestOutput
from ostinato.errors import CapacityError, ConfigError
from ostinato.json_io import JsonObject
from ostinato.plan.graphs.coverage import FULL_MODES, PIECEWISE_MODES
from ostinato.runner.draft_override import override_drafts
from ostinato.verify.compare import Divergence, Verdict, compare, verdict_of
from ostinato.verify.engine_configs import way_config
from ostinato.verify.matrix import VerifyVariant
from ostinato.verify.reference_run import PlainPath, ReferenceCase, ReferenceDrafts, complete, run_to_end
from ostinato.verify.test_prompts import Prompt

KINDS = ("greedy", "sampled")
CACHES = ("cold", "warm")


@dataclass(frozen=True)
class TokenMismatch:
    """A divergence and its request."""

    kind: str
    prompt: int
    divergence: Divergence

    def to_json(self) -> JsonObject:
        return {"kind": self.kind, "prompt": self.prompt, **asdict(self.divergence)}


@dataclass(frozen=True)
class Cell:
    """Result of a way with a `cold` or `warm` cache.

    `counts` are the events during the run, `notes` the events that did not happen, so that the cell proves nothing
    about them.
    """

    way: VerifyVariant
    cache: str
    found: tuple[TokenMismatch, ...] = ()
    counts: Mapping[str, int] | None = None
    notes: tuple[str, ...] = ()
    error: str | None = None

    @property
    def verdict(self) -> Verdict:
        return max((self.verdict_of(kind) for kind in KINDS), key=list(Verdict).index)

    def verdict_of(self, kind: str) -> Verdict:
        if self.error is not None:
            return Verdict.ERROR
        return verdict_of([finding.divergence for finding in self.found if finding.kind == kind])

    def to_json(self) -> JsonObject:
        return {
            **self.way.to_json(),
            "cache": self.cache,
            "verdict": self.verdict,
            **{kind: self.verdict_of(kind) for kind in KINDS},
            "found": [finding.to_json() for finding in self.found],
            "counts": None if self.counts is None else dict(self.counts),
            "notes": list(self.notes),
            "error": self.error,
        }


def run_ways(
    config: EngineConfig,
    ways: Sequence[VerifyVariant],
    plain: PlainPath,
    prompts: Sequence[Prompt],
    cases: Sequence[ReferenceCase],
) -> Iterator[Cell]:
    """Yield two cells of each way, cold and warm, in the order of `ways`.

    Neighbouring ways with the same settings share an engine. An exception of an engine becomes the error of its cells;
    ConfigError and CapacityError are raised again.
    """
    engine: EngineCore | None = None
    last: VerifyVariant | None = None
    for way in ways:
        try:
            if engine is None or last is None or way.settings != last.settings:
                engine = None  # free its memory for the next one
                engine = EngineCore(way_config(config, **way.settings))
                override_drafts(engine.runner, ReferenceDrafts(engine.spec.vocab_size, cases))
                engine.runner.expose_padding()
            assert engine.reset_prefix_cache(), "a finished request holds a prefix"
        except (ConfigError, CapacityError):
            raise
        except Exception as error:
            engine = None
            yield from (Cell(way, cache, error=f"{type(error).__name__}: {error}") for cache in CACHES)
            continue
        last = way
        for cache in CACHES:
            if engine is None:
                yield Cell(way, cache, error="not run: its engine failed before")
                continue
            try:
                yield _run(engine, way, cache, plain, prompts, cases)
            except Exception as error:
                engine = None
                yield Cell(way, cache, error=f"{type(error).__name__}: {error}")


def _run(
    engine: EngineCore,
    way: VerifyVariant,
    cache: str,
    plain: PlainPath,
    prompts: Sequence[Prompt],
    cases: Sequence[ReferenceCase],
) -> Cell:
    before = _counts(engine)
    outputs: dict[int, RequestOutput] = {}
    for is_second in (False, True):
        turn = [i for i, case in enumerate(cases) if (prompts[case.number].after is not None) == is_second]
        outputs |= zip(turn, run_to_end(engine, [cases[i].request() for i in turn], way.preemption), strict=True)
    problem = None if way.preemption else _mixed_salts(engine, cache, prompts, cases, outputs)
    mismatches = []
    for i, case in enumerate(cases):
        go_on = partial(_go_on, engine, case, way.preemption)
        for divergence in compare(case.tokens, outputs[i].outputs[0].token_ids, partial(plain.scores, case), go_on):
            mismatches.append(TokenMismatch(case.kind, case.number, divergence))
    after = _counts(engine)
    counts = {name: after[name] - before[name] for name in after}
    return Cell(way, cache, tuple(mismatches), counts, tuple(_not_shown(engine, way, cache, counts)), problem)


def _go_on(engine: EngineCore, case: ReferenceCase, preempts: bool, done: int) -> list[int]:
    """Return the engine's tokens after the first `done` tokens of the plain output."""
    [tokens] = complete(engine, [case.request(done)], preempts)
    return tokens


def _mixed_salts(
    engine: EngineCore,
    cache: str,
    prompts: Sequence[Prompt],
    cases: Sequence[ReferenceCase],
    outputs: Mapping[int, RequestOutput],
) -> str | None:
    """Return what is wrong with the hits of first turns with a salt of their own, which tokens do not show."""
    counters = engine.stats()["prefix_cache"]
    lost = any(count for name, count in counters.items() if name.startswith("evicted") or name.endswith("not_taken"))
    for i, case in enumerate(cases):
        if not prompts[case.number].salted:
            continue
        hit = outputs[i].num_cached_tokens or 0
        # Files may hold what requests of the same salt left in an earlier run.
        if hit and cache == "cold" and engine.plan.settings.cache_offload is None:
            return f"prompt {case.number} ({case.kind}) has a cache_salt of its own, and found {hit} tokens of others"
        if not hit and cache == "warm" and _can_hit(engine) and not lost:
            return f"prompt {case.number} ({case.kind}) did not find what requests of its cache_salt left in the cache"
    return None


def _can_hit(engine: EngineCore) -> bool:
    settings, slots = engine.plan.settings, engine.plan.memory.num_slots
    return settings.enable_prefix_caching and (settings.state_cache_mode != "none" or not slots)


def _counts(engine: EngineCore) -> dict[str, int]:
    """Count the events since the engine was made."""
    stats = engine.stats()
    steps, speculation = stats["graphs"]["steps"], stats["speculation"] or {}
    return {
        "drafts_proposed": speculation.get("drafts_proposed", 0),
        "drafts_accepted": speculation.get("drafts_accepted", 0),
        "cached_tokens": stats["prefix_cache"]["cached_tokens"],
        "preemptions": stats["preemptions"],
        "steps_ahead": stats["steps_ahead"],
        "void_rows": stats["void_rows"],
        "full_steps": steps["full"],
        "piecewise_steps": steps["piecewise"],
        "eager_steps": steps["eager"],
    }


def _not_shown(engine: EngineCore, way: VerifyVariant, cache: str, counts: Mapping[str, int]) -> Iterator[str]:
    """Yield a note for each part of the way that no request exercised."""
    if way.speculative is not None:
        if not counts["drafts_proposed"]:
            yield "no draft was proposed"
        elif not counts["drafts_accepted"]:
            yield "no draft was accepted"
        elif counts["drafts_accepted"] == counts["drafts_proposed"]:
            yield "no draft was rejected"
    if cache == "warm" and _can_hit(engine) and not counts["cached_tokens"]:
        yield "no prompt hit the cache"
    if way.preemption and not counts["preemptions"]:
        yield "no request was preempted"
    if way.overlap == "on" and not counts["steps_ahead"]:
        yield "no step was scheduled ahead"
    if way.graph_mode in FULL_MODES and not counts["full_steps"]:
        yield "no step ran as a full graph"
    if way.graph_mode in PIECEWISE_MODES and not counts["piecewise_steps"]:
        yield "no step ran as a piecewise graph"
