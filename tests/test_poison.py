"""Padding is harmless: what nobody has written is never read, whatever stands there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ostinato import EngineConfig, SamplingParams
from ostinato.cache.pool import Pool
from ostinato.engine.engine import Engine
from tests.checkpoints import RECIPES, checkpoint, random_prompt

NAN = float("nan")


def nobody_s(pool: Pool) -> list[int]:
    """The null id and those that are free."""
    return [0, *pool._free] if pool.count else []


def poison(engine: Engine) -> None:
    """NaN into null block and null slot, every free block and slot, and the unwritten end of every block table."""
    cache, block_size = engine.scheduler.cache, engine.runner.block_size
    blocks, slots = nobody_s(cache.blocks), nobody_s(cache.slots)
    cells = [block * block_size + offset for block in blocks for offset in range(block_size)]
    for request in engine.scheduler._running:
        table = cache.holding(request.request_id).block_table
        for position in range(request.num_computed_tokens, len(table) * block_size):
            cells.append(table[position // block_size] * block_size + position % block_size)
    for layer in engine.runner.memory:
        if layer.k_cache is not None and layer.v_cache is not None:
            layer.k_cache.flatten(0, 1)[cells] = NAN
            layer.v_cache.flatten(0, 1)[cells] = NAN
        if layer.conv_states is not None and layer.ssm_states is not None:
            layer.conv_states[slots] = NAN
            layer.ssm_states[slots] = NAN


def spoil(engine: Engine, request_id: str) -> None:
    """NaN into the blocks and the slot that a request holds."""
    holding = engine.scheduler.cache.holding(request_id)
    for layer in engine.runner.memory:
        if layer.k_cache is not None and layer.v_cache is not None:
            layer.k_cache[list(holding.block_table)] = NAN
            layer.v_cache[list(holding.block_table)] = NAN
        if layer.conv_states is not None and layer.ssm_states is not None:
            layer.conv_states[list(holding.slots)] = NAN
            layer.ssm_states[list(holding.slots)] = NAN


def record_logits(engine: Engine) -> list[torch.Tensor]:
    """All logits that the model gives from now on."""
    model, seen = engine.runner.model, []

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        values = type(model).logits(model, hidden)
        seen.append(values.clone())
        return values

    model.logits = logits  # type: ignore[method-assign]
    return seen


def small_engine(name: str) -> Engine:
    """With three rows and, if the model has blocks, too few of them for three requests."""
    settings: dict[str, Any] = {"max_model_len": 96, "max_num_seqs": 3, "max_num_batched_tokens": 24, "threads": 1}
    config = EngineConfig(model=str(checkpoint(name)), dtype="float32", cache_memory="4MiB", **settings)
    memory = Engine(config).plan.memory
    few = memory.kv_block * 9 + memory.state_slot * 4
    return Engine(config.with_settings(cache_memory=few))


def run(engine: Engine, after_step: Callable[[Engine], None]) -> dict[str, tuple[str | None, list[int]]]:
    """Requests of unequal length join, leave, are aborted and preempted. -> how each ended, and its tokens."""
    after_step(engine)
    arrivals = {0: ("a", 50, 40), 2: ("b", 7, 60), 3: ("c", 33, 12), 9: ("d", 20, 20), 11: ("e", 40, 3)}
    ended: dict[str, tuple[str | None, list[int]]] = {}
    for step in range(300):
        if step in arrivals:
            name, length, new = arrivals[step]
            params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
            engine.add(random_prompt(length, seed=length), params, request_id=name)
        if step in (2, 12, 20):
            engine.scheduler.preempt("a")
        if step == 15:
            engine.abort("d")
        for output in engine.step():
            if output.finished:
                [only] = output.outputs
                ended[output.request_id] = only.finish_reason, only.token_ids
        engine.scheduler.check_integrity()
        after_step(engine)
        if step > max(arrivals) and not engine.has_unfinished:
            return ended
    raise AssertionError("the requests did not come to an end")


@pytest.mark.parametrize("name", RECIPES)
def test_what_nobody_has_written_never_reaches_a_logit(name: str) -> None:
    """The same steps with and without poison after each of them give the same bits."""
    plain, poisoned = small_engine(name), small_engine(name)
    expected_logits, logits = record_logits(plain), record_logits(poisoned)
    expected = run(plain, lambda _: None)
    assert run(poisoned, poison) == expected
    assert {name: len(tokens) for name, (_, tokens) in expected.items()} == {"a": 40, "b": 60, "c": 12, "e": 3}
    assert {reason for reason, _ in expected.values()} == {"length"}
    for given, wanted in zip(logits, expected_logits, strict=True):
        assert given.isfinite().all()
        assert torch.equal(given, wanted)
    preemptions = poisoned.scheduler.counters.preemptions
    assert preemptions >= (4 if poisoned.plan.memory.num_blocks else 3)


def test_a_request_whose_memory_is_spoiled_ends_alone() -> None:
    """Its rows overflow in every layer; the other request of the batch has the tokens that it has alone."""
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts = {"other": random_prompt(30, seed=1), "spoiled": random_prompt(20, seed=0)}
    engine = small_engine("nemotron_h")
    alone = engine.output(engine.add(prompts["other"], params))
    while engine.has_unfinished:
        engine.step()
    for name, prompt in prompts.items():
        engine.add(prompt, params, request_id=name)
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
    engine.add(random_prompt(20, seed=0), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    engine.step()
    poison(engine)
    [request] = engine.scheduler._running
    holding = engine.scheduler.cache.holding(request.request_id)
    [attention] = [layer for layer in engine.runner.memory if layer.k_cache is not None]
    assert attention.k_cache is not None
    written = attention.k_cache[list(holding.block_table)].flatten(0, 1).isfinite().flatten(1).all(1)
    assert written.tolist() == [True] * 20 + [False] * 12
    assert attention.k_cache[0].isnan().all()
    for layer in engine.runner.memory:
        if layer.ssm_states is not None:
            layer.ssm_states[list(holding.slots)] = NAN
    engine.step()
    assert logits[-1].isnan().all()
