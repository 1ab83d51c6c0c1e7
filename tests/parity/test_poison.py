"""Padding is harmless: what nobody has written is never read, whatever stands there, and padding writes nothing that
anybody reads. So it is in every graph mode, also for what graphs compute in and read their inputs from."""

from __future__ import annotations

import pytest

from ostinato import SamplingParams
from tests.support.checkpoints import RECIPES, random_prompt
from tests.support.parity import CACHING, has_state
from tests.support.poison import (
    ARRIVALS,
    NAN,
    assert_same_logits,
    assert_written,
    poison,
    record_logits,
    run,
    small_engine,
    spoil,
    watch_writes,
)
from tests.support.tensors import as_tensor
from tests.support.turns import in_turns

SMALL_ENGINES = [
    *((name, mode, num_slots) for name, mode in CACHING for num_slots in ((3, 6) if has_state(name) else (0,))),
    *((name, "none", 3) for name in RECIPES if has_state(name)),
]
"""Recipe, mode of the state cache, and slots: as many as rows, or some more."""

GRAPH_MODES = ("none", "piecewise", "full_decode_only", "full_and_piecewise")
SMALL_ENGINES_BY_GRAPH_MODE = [
    *((*engine, "full_and_piecewise") for engine in SMALL_ENGINES),
    *((*engine, "none") for engine in SMALL_ENGINES if engine[0] in ("llama", "nemotron_h")),
    # Slots enough for checkpoints in one mode, as few as rows in the other.
    *((*engine, "piecewise") for engine in SMALL_ENGINES if engine[1:] in (("align", 6), ("none", 0))),
    *((*engine, "full_decode_only") for engine in SMALL_ENGINES if engine[1:] in (("all", 3), ("none", 0))),
]
CELLS = in_turns(
    SMALL_ENGINES_BY_GRAPH_MODE,
    "poison",
    always=lambda name, *modes: modes in (("all", 6, "full_and_piecewise"), ("none", 0, "full_and_piecewise")),
)


@pytest.mark.parametrize(("name", "mode", "num_slots", "graph_mode"), CELLS)
def test_what_nobody_has_written_never_reaches_a_logit(name: str, mode: str, num_slots: int, graph_mode: str) -> None:
    """The same steps with and without poison after each of them give the same bits, and no step writes what is not
    its rows' to write."""
    plain, poisoned = (small_engine(name, mode, graph_mode, num_slots=num_slots) for _ in range(2))
    watch_writes(poisoned)
    expected_logits, logits = record_logits(plain), record_logits(poisoned)
    expected = run(plain, lambda _: None)
    assert run(poisoned, poison) == expected
    assert {name: len(tokens) for name, (_, tokens) in expected.items()} == {
        name: new for name, _, new in ARRIVALS.values() if name != "d"
    }
    assert {reason for reason, _ in expected.values()} == {"length"}
    assert_same_logits(logits, expected_logits)
    memory = poisoned.plan.memory
    assert poisoned.scheduler.counters.preemptions >= (4 if memory.num_blocks else 3)
    prefix = poisoned.stats()["prefix_cache"]
    hits = mode != "none" or not has_state(name)
    assert (prefix["cached_tokens"] > 0) == (prefix["restored_tokens"] > 0) == hits
    assert (prefix["evicted_blocks"] > 0) == (memory.num_blocks > 0)
    assert (prefix["evicted_checkpoints"] > 0) == (hits and has_state(name))
    steps = poisoned.stats()["graphs"]["steps"]
    assert (steps["full"] > 0) == graph_mode.startswith("full")
    assert (steps["piecewise"] > 0) == graph_mode.endswith("piecewise")
    assert (steps["eager"] > 0) == (graph_mode in ("none", "full_decode_only"))
    assert_written(poisoned)


@pytest.mark.parametrize("name", ["nemotron_h", "qwen3_next"])
def test_nor_does_a_slot_whose_checkpoint_was_packed(name: str) -> None:
    plain, poisoned = (small_engine(name, "all", num_slots=5, ssm_checkpoint_dtype="int8") for _ in range(2))
    watch_writes(poisoned)
    expected_logits, logits = record_logits(plain), record_logits(poisoned)
    assert run(poisoned, poison) == run(plain, lambda _: None)
    assert_same_logits(logits, expected_logits)
    prefix = poisoned.stats()["prefix_cache"]
    assert min(prefix["packed_checkpoints"], prefix["unpacked_checkpoints"]) > 0


@pytest.mark.parametrize("name", ["llama", "nemotron_h", "gemma3_text", "qwen4_exp_text"])
def test_nor_does_a_scale_of_integers_that_nobody_has_written(name: str) -> None:
    plain, poisoned = (small_engine(name, kv_cache_dtype="int8") for _ in range(2))
    watch_writes(poisoned)
    expected_logits, logits = record_logits(plain), record_logits(poisoned)
    assert run(poisoned, poison) == run(plain, lambda _: None)
    assert_same_logits(logits, expected_logits)
    assert_written(poisoned)


def test_a_request_whose_memory_is_spoiled_ends_alone() -> None:
    """Its rows overflow in every layer; the other request of the batch has the tokens that it has alone."""
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts = {"other": random_prompt(30, seed=1), "spoiled": random_prompt(20, seed=0)}
    engine = small_engine("nemotron_h")
    alone = engine.output(engine.add_request(prompts["other"], params))
    while engine.has_unfinished:
        engine.step()
    for name, prompt in prompts.items():
        engine.add_request(prompt, params, request_id=name)
    other, spoiled = engine.output("other"), engine.output("spoiled")
    assert alone is not None
    assert other is not None
    assert spoiled is not None
    while len(spoiled.outputs[0].token_ids) < 3:
        engine.step()
    spoil(engine, "spoiled")
    engine.step()
    assert (spoiled.outputs[0].finish_reason, len(spoiled.outputs[0].token_ids)) == ("error", 3)
    assert "request spoiled;" in str(spoiled.error)
    while engine.has_unfinished:
        engine.step()
        engine.scheduler.check_integrity()
    assert other.error is None
    assert other.outputs == alone.outputs


def test_the_poison_is_where_the_other_tests_believe_it_to_be() -> None:
    """Reading any of it would be seen: a slot that is poisoned while it is held spoils the logits."""
    engine = small_engine("nemotron_h")
    logits = record_logits(engine)
    engine.add_request(random_prompt(20, seed=0), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    engine.step()
    poison(engine)
    [request] = engine.scheduler.queues.running
    holding = engine.scheduler.cache.request_cache(request.request_id)
    [attention] = [layer for layer in engine.runner.layer_memory if layer.k_cache is not None]
    assert attention.k_cache is not None
    written = as_tensor(attention.k_cache)[list(holding.block_table)].flatten(0, 1).isfinite().flatten(1).all(1)
    assert written.tolist() == [True] * 20 + [False] * 12
    assert as_tensor(attention.k_cache[0]).isnan().all()
    for layer in engine.runner.layer_memory:
        if "ssm" in layer.states:
            as_tensor(layer.states["ssm"])[list(holding.write_slots)] = NAN
    engine.step()
    assert logits[-1].isnan().all()
