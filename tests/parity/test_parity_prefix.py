"""Warm equals cold: whatever a request takes from the prefix cache, it gives the tokens and logits of transformers, in
every mode of the state cache, for every architecture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from ostinato import SamplingParams
from ostinato.engine.core import EngineCore
from ostinato.scheduler.batch import Batch
from tests.support.checkpoints import RECIPES, random_prompt
from tests.support.parity import (
    BLOCK,
    CACHING,
    NEW,
    PROMPT,
    add,
    cached,
    check,
    complete,
    decided_case,
    has_state,
    make_engine,
    misses,
    run,
    run_with_preemptions,
    shrink,
    warm,
)
from tests.support.turns import in_turns

ODD_END = 5
"""Tokens of the prompts' last block; with block boundaries at their ends they would test less."""


def caching(test: Callable[[str, str], None]) -> Callable[[str, str], None]:
    """Run `test(name, mode)` for recipes in turn, and every mode in which their prompts hit."""
    return pytest.mark.parametrize(("name", "mode"), in_turns(CACHING, test.__name__))(test)


def last_boundary(num_tokens: int) -> int:
    """The longest prefix of so many tokens that can hit: whole blocks, and not the last token."""
    return max(num_tokens - 1, 0) // BLOCK * BLOCK


# Hits of every length


@dataclass(frozen=True)
class Hit:
    """A prompt of `length` tokens that finds the first `hit` of them. `branches`: not because a prompt ended there,
    but because two others went on differently."""

    length: int
    hit: int
    branches: bool = False

    @property
    def salt(self) -> str:
        return f"{self.length} {self.hit} {self.branches}"


HITS = [
    *(Hit(PROMPT, hit) for hit in range(BLOCK, PROMPT, BLOCK)),
    *(Hit(PROMPT, hit, branches=True) for hit in range(BLOCK, PROMPT, BLOCK)),
    *(Hit(144, hit) for hit in range(BLOCK, 144, BLOCK)),
    *(Hit(145, hit) for hit in (128, 144)),
]
"""144 is a multiple of the block size, so its last block cannot hit; after a hit of 144 of 145, one token is left."""


@pytest.mark.parametrize(("name", "mode"), in_turns(CACHING, "hits", always=lambda name, mode: mode != "align"))
def test_a_prompt_gives_the_same_tokens_whatever_part_of_it_hits(name: str, mode: str) -> None:
    engine = make_engine(
        name, state_cache_mode=mode, max_num_seqs=len(HITS), max_num_batched_tokens=512, cache_memory="128MiB"
    )
    shrink(engine, num_blocks=1000, num_slots=400)
    assert engine.plan.settings.state_cache_mode == mode
    cases = [decided_case(name, each.length) for each in HITS]
    for each, case in zip(HITS, cases, strict=True):
        if not each.branches:
            warm(engine, case.prompt[: each.hit + 1], each.salt)
    run(engine)
    for seed in (100, 101):  # the second finds where it leaves the first
        for each, case in zip(HITS, cases, strict=True):
            if each.branches:
                warm(engine, case.prompt[: each.hit] + random_prompt(BLOCK + ODD_END, seed), each.salt)
        run(engine)
    outputs = [add(engine, case, salt=each.salt) for each, case in zip(HITS, cases, strict=True)]
    run(engine)
    assert [cached(output) for output in outputs] == [each.hit for each in HITS]
    for case, output in zip(cases, outputs, strict=True):
        check(case, output)


@caching
def test_a_prompt_whose_length_is_a_multiple_of_the_block_size_hits_when_it_comes_again(name: str, mode: str) -> None:
    engine = make_engine(name, state_cache_mode=mode)
    case = decided_case(name, 144)
    for hit in (0, 128):
        output = complete(engine, case)
        assert cached(output) == hit
        assert misses(output)["recomputed_tail"] == BLOCK


# Requests that run together


@caching
def test_a_request_finds_the_prefix_of_one_that_still_runs(name: str, mode: str) -> None:
    """The first decodes, the second finds what there is of their common 96 tokens, and the third all of it."""
    engine = make_engine(name, state_cache_mode=mode, max_num_batched_tokens=64)
    first = decided_case(name, PROMPT)
    second = decided_case(name, 131, tuple(first.prompt[:96]))
    third = decided_case(name, 117, tuple(first.prompt[:96]))
    outputs = []
    for case in (first, second, third):
        outputs.append(add(engine, case))
        for _ in range(8):
            engine.step()
            engine.scheduler.check_integrity()
    assert engine.scheduler.num_running == 3
    run(engine)
    # In mode align the first one's chunks end at 64 and 128; the second takes a checkpoint where it leaves.
    assert [cached(output) for output in outputs] == [0, 64 if mode == "align" else 96, 96]
    for case, output in zip((first, second, third), outputs, strict=True):
        check(case, output)


@caching
def test_requests_that_compute_one_prefix_at_the_same_time_share_its_blocks(name: str, mode: str) -> None:
    engine = make_engine(name, state_cache_mode=mode, max_num_batched_tokens=512)
    first = decided_case(name, PROMPT)
    cases = [first, decided_case(name, 131, tuple(first.prompt[:96])), first]
    outputs = [add(engine, case) for case in cases]
    engine.step()
    cache, common = engine.scheduler.cache, {"align": 128}.get(mode, 144)  # after 128, mode align cuts the chunk
    if cache.blocks.count:
        tables = [cache.request_cache(output.request_id).block_table for output in outputs]
        assert tables[0][: 96 // BLOCK] == tables[1][: 96 // BLOCK]
        assert tables[0][: common // BLOCK] == tables[2][: common // BLOCK]
        assert cache.blocks.num_used == len({block for table in tables for block in table})
    run(engine)
    assert engine.stats()["prefix_cache"]["shared_blocks"] == (15 + NEW // BLOCK if cache.blocks.count else 0)
    for case, output in zip(cases, outputs, strict=True):
        check(case, output)
        assert cached(output) == 0


@caching
def test_a_conversation_hits_where_its_last_turn_ended(name: str, mode: str) -> None:
    engine = make_engine(name, state_cache_mode=mode, max_model_len=512, max_num_batched_tokens=64)
    shrink(engine, num_blocks=120, num_slots=60)
    text: list[int] = []
    for turn in range(5):
        case = decided_case(name, len(text) + (13 if text else 37), tuple(text))
        output = complete(engine, case)
        # The last token of an output is not computed.
        assert cached(output) == last_boundary(len(text)), f"turn {turn + 1}"
        text = case.prompt + case.tokens


# Eviction and preemption


@caching
@pytest.mark.parametrize("scarce", ["blocks", "slots"])
def test_a_prompt_that_was_evicted_is_computed_again_and_hits_again(name: str, mode: str, scarce: str) -> None:
    engine = make_engine(name, state_cache_mode=mode)
    cache = engine.scheduler.cache
    if not (cache.blocks if scarce == "blocks" else cache.slots).count:
        pytest.skip(f"the model has no {scarce}")
    shrink(engine, *((18, 40) if scarce == "blocks" else (400, 9)))
    case = decided_case(name, PROMPT)
    warm(engine, case.prompt)
    run(engine)
    for seed in range(50, 62):
        warm(engine, random_prompt(PROMPT, seed))
        run(engine)
    counters = engine.stats()["prefix_cache"]
    assert counters["evicted_blocks" if scarce == "blocks" else "evicted_checkpoints"] > 0
    output = complete(engine, case)
    assert cached(output) < 144
    assert misses(output)["evicted_block" if scarce == "blocks" else "evicted_checkpoint"] > 0
    assert cached(complete(engine, case)) == 144


@caching
@pytest.mark.parametrize("salt", [None, "warm"])
def test_preempted_requests_find_what_they_have_computed(name: str, mode: str, salt: str | None) -> None:
    """In the middle of the prompt and twice while decoding, with a cache that was cold or warm when they came."""
    engine = make_engine(name, state_cache_mode=mode, max_num_batched_tokens=64)
    first = decided_case(name, PROMPT)
    cases = [first, decided_case(name, 131, tuple(first.prompt[:96]))]
    warm(engine, first.prompt[:70], "warm")
    run(engine)
    outputs = [add(engine, case, salt=salt) for case in cases]
    run_with_preemptions(engine, outputs)
    assert cached(outputs[0]) == (0 if salt is None else 64)
    assert engine.scheduler.counters.preemptions >= 5
    prefix = engine.scheduler.prefix_counters
    # Each of the four in decoding finds its prompt's last boundary, at the least.
    assert prefix.restored_tokens >= 4 * 128
    for case, output in zip(cases, outputs, strict=True):
        check(case, output)


@caching
def test_requests_with_no_slot_to_spare_take_over_the_checkpoints_that_they_read(name: str, mode: str) -> None:
    engine = make_engine(name, state_cache_mode=mode, max_num_seqs=3, max_num_batched_tokens=64)
    shrink(engine, num_blocks=40, num_slots=3)
    first = decided_case(name, PROMPT)
    cases = [
        first,
        decided_case(name, 131, tuple(first.prompt[:96])),
        decided_case(name, 117, tuple(first.prompt[:96])),
    ]
    warm(engine, first.prompt)
    run(engine)
    outputs = [add(engine, case) for case in (*cases, *cases)]
    run(engine)
    for case, output in zip((*cases, *cases), outputs, strict=True):
        check(case, output)
    assert cached(outputs[0]) == 144
    assert (engine.stats()["prefix_cache"]["checkpoints_not_taken"] > 0) == has_state(name)


# Chunks


def record_batches(engine: EngineCore) -> list[Batch]:
    """All batches that the engine computes from now on."""
    run_batch, seen = engine.runner.execute, []

    def recorded(batch: Batch) -> object:
        seen.append(batch)
        return run_batch(batch)

    engine.runner.execute = recorded  # type: ignore[method-assign,assignment]
    return seen


@caching
@pytest.mark.parametrize("budget", [21, 37])
def test_a_prefix_that_was_computed_in_odd_chunks_hits(name: str, mode: str, budget: int) -> None:
    engine = make_engine(name, state_cache_mode=mode, max_num_batched_tokens=budget)
    case = decided_case(name, PROMPT)
    warm(engine, case.prompt)
    run(engine)
    cases = [case, decided_case(name, 131, tuple(case.prompt[:96])), decided_case(name, 117, tuple(case.prompt[:96]))]
    outputs = [add(engine, each) for each in cases]
    run(engine)
    for each, output in zip(cases, outputs, strict=True):
        check(each, output)
    assert cached(outputs[0]) == 144
    if mode != "align":
        assert [cached(output) for output in outputs[1:]] == [96, 96]


@pytest.mark.parametrize("name", [name for name in RECIPES if has_state(name)])
def test_mode_align_cuts_chunks_where_checkpoints_stand_and_mode_all_does_not(name: str) -> None:
    ends, prompt = {}, random_prompt(PROMPT, seed=0)
    for mode in ("align", "all", "none"):
        engine = make_engine(name, state_cache_mode=mode, max_num_batched_tokens=70)
        batches = record_batches(engine)
        warm(engine, prompt)
        run(engine)
        ends[mode] = [row.end for batch in batches for row in batch.rows if row.start < PROMPT]
    assert ends == {"align": [64, 128, 144, PROMPT], "all": [70, 140, PROMPT], "none": [70, 140, PROMPT]}


@pytest.mark.parametrize("name", RECIPES)
def test_without_chunked_prefill_prompts_hit_in_mode_all(name: str) -> None:
    engine = make_engine(name, enable_chunked_prefill=False, max_num_batched_tokens=200)
    assert engine.plan.settings.state_cache_mode == ("all" if has_state(name) else "none")
    case = decided_case(name, PROMPT)
    cases = [case, decided_case(name, 131, tuple(case.prompt[:96]))]
    batches = record_batches(engine)
    warm(engine, case.prompt)
    run(engine)
    outputs = [add(engine, each) for each in cases]
    run(engine)
    assert [cached(output) for output in outputs] == [144, 96]
    for each, output in zip(cases, outputs, strict=True):
        check(each, output)
    prefills = [len(row.token_ids) for batch in batches for row in batch.rows[batch.num_decode_rows :]]
    assert prefills == [150, 6, 35]


# Where nothing may be taken


@pytest.mark.parametrize("name", [name for name in RECIPES if has_state(name)])
def test_in_mode_none_a_prompt_that_comes_again_is_computed_again_and_told_why(name: str) -> None:
    engine = make_engine(name, state_cache_mode="none")
    case = decided_case(name, PROMPT)
    warm(engine, case.prompt)
    run(engine)
    assert misses(complete(engine, case)) == {"no_checkpoint": 144, "recomputed_tail": 6}


@pytest.mark.parametrize("name", RECIPES)
def test_without_prefix_caching_no_prompt_wants_the_cache(name: str) -> None:
    engine = make_engine(name, enable_prefix_caching=False)
    case = decided_case(name, PROMPT)
    outputs = []
    for _ in range(2):  # the second begins after the first's prompt
        outputs.append(add(engine, case))
        engine.step()
    run(engine)
    for output in outputs:
        check(case, output)
        assert misses(output) == {"not_wanted": PROMPT}
    usage = engine.scheduler.cache.usage()
    assert usage.blocks_cached == usage.slots_cached == 0


@caching
def test_log_probabilities_of_a_prompt_are_computed_beside_requests_that_hit(name: str, mode: str) -> None:
    engine = make_engine(name, state_cache_mode=mode)
    case = decided_case(name, PROMPT)
    warm(engine, case.prompt)
    run(engine)
    scored, hitting = add(engine, case, prompt_logprobs=True), add(engine, case)
    run(engine)
    assert (cached(scored), misses(scored)) == (0, {"not_wanted": PROMPT})
    assert cached(hitting) == 144
    for output in (scored, hitting):
        check(case, output)


@caching
def test_sampled_tokens_are_the_same_warm_and_cold(name: str, mode: str) -> None:
    """Three samples of one request, which share their prompt, and each of them again."""
    engine = make_engine(name, state_cache_mode=mode, max_num_batched_tokens=160)
    prompt = decided_case(name, PROMPT).prompt
    params = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=24, ignore_eos=True)
    tokens = []
    for settings in ({"cache_salt": "cold"}, {"cache_salt": "cold"}, {}):
        output = engine.output(engine.add_request(prompt, params, **settings))
        assert output is not None
        run(engine)
        tokens.append([each.token_ids for each in output.outputs])
        assert cached(output) == (144 if len(tokens) == 2 else 0)
    assert tokens[0] == tokens[1] == tokens[2]
    assert len({tuple(each) for each in tokens[0]}) == 3
    prefix = engine.stats()["prefix_cache"]
    assert prefix["cached_tokens"] + sum(prefix["misses"].values()) == 9 * PROMPT
    assert len(tokens[0][0]) < NEW
