"""Padding is harmless: what nobody has written is never read, whatever stands there, and padding writes nothing that
anybody reads. So it is in every graph mode, also for what graphs compute in and read their inputs from."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ostinato import SamplingParams
from ostinato.cache.holding import Holding
from ostinato.cache.pool import Pool
from ostinato.engine.engine import Engine
from ostinato.graphs.tape import TapeBackend
from ostinato.schedule.batch import Batch, StepResult
from tests.checkpoints import RECIPES, random_prompt
from tests.parity import CACHING, has_state, make_engine, shrink

NAN = float("nan")

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


def nobody_s(pool: Pool) -> list[int]:
    """The null id and those that are free: no request holds them, and the index does not know them."""
    return [0, *pool._free] if pool.count else []


def unread_slots(holding: Holding) -> list[int]:
    """Those that a request will write and not read before: its state still stands in a checkpoint."""
    return [slot for slot in holding.slots if slot != holding.read_slot]


def poison(engine: Engine) -> None:
    """NaN into null block and null slot, every free block and slot, and what requests hold and have not written: the
    ends of their block tables, and write slots beside their state."""
    cache, block_size = engine.scheduler.cache, engine.runner.block_size
    blocks, slots = nobody_s(cache.blocks), nobody_s(cache.slots)
    cells: list[int] = []
    for request in engine.scheduler._running:
        holding = cache.holding(request.request_id)
        slots += unread_slots(holding)
        for position in range(request.num_computed_tokens, len(holding.block_table) * block_size):
            cells.append(holding.block_table[position // block_size] * block_size + position % block_size)
    poison_graphs(engine)
    for layer in engine.runner.memory:
        if layer.k_cache is not None and layer.v_cache is not None:
            for kept in (layer.k_cache, layer.v_cache):
                kept[blocks] = NAN
                kept.flatten(0, 1)[cells] = NAN
        if layer.conv_states is not None and layer.ssm_states is not None:
            layer.conv_states[slots] = NAN
            layer.ssm_states[slots] = NAN


@torch.inference_mode()
def poison_graphs(engine: Engine) -> None:
    """NaN where graphs compute, and in the buffers that they read, rows of a step that would write to what requests
    hold: to every block and to every slot, in turn."""
    graphs, memory = engine.runner.graphs, engine.plan.memory
    backend, buffers = graphs._backend, graphs._buffers
    assert isinstance(backend, TapeBackend)
    backend.arena.poison()
    if not graphs.planned():
        return
    numbers = torch.arange(10_000)
    stale = {
        "kv_cells": numbers * engine.runner.block_size % (max(memory.num_blocks, 1) * engine.runner.block_size),
        "row_starts": numbers.clamp(max=24),
        "kv_lens": torch.full_like(numbers, 17),
        "block_tables": numbers % max(memory.num_blocks, 1),
    }
    for name, buffer in buffers.named():
        if name == "block_tables":  # columns that no step has used yet are 0 from the start
            buffer = buffer[:, : buffers._table_columns]
        values = stale.get(name, numbers % max(memory.num_slots, 1))
        buffer[:] = values[: buffer.numel()].view(buffer.shape)


def watch_writes(engine: Engine) -> None:
    """From now on, every step is checked to leave alone what is not its rows' to write: cells of other tokens and
    other slots, whether anybody holds them or not. The null block and the null slot are for padding."""
    run_batch, block_size = engine.runner.run, engine.runner.block_size

    def watched(batch: Batch) -> StepResult:
        cells = [
            row.block_table[position // block_size] * block_size + position % block_size
            for row in batch.rows
            for position in range(row.start, row.end)
            if row.block_table
        ]
        slots = [0, *(slot for row in batch.rows for slot in row.write_slots)]
        slots += [slot for row in batch.rows for _, slot in row.checkpoints]
        before = others(engine, cells, slots)
        result = run_batch(batch)
        for kept, was in zip(others(engine, cells, slots), before, strict=True):
            assert torch.equal(kept, was), "a step has written what is not its rows' to write"
        return result

    engine.runner.run = watched  # type: ignore[method-assign]


def others(engine: Engine, cells: list[int], slots: list[int]) -> list[torch.Tensor]:
    """The bits of all cache memory but that of these cells, these slots and the null block."""
    bits = []
    for layer in engine.runner.memory:
        for kept, left_out in (
            *((cache, [*range(engine.runner.block_size), *cells]) for cache in (layer.k_cache, layer.v_cache)),
            *((states, slots) for states in (layer.conv_states, layer.ssm_states)),
        ):
            if kept is None:
                continue
            copy = (kept.flatten(0, 1) if kept is layer.k_cache or kept is layer.v_cache else kept).clone()
            copy[left_out] = 0
            bits.append(copy.view(torch.int32))
    return bits


def spoil(engine: Engine, request_id: str) -> None:
    """NaN into the blocks and the slots that a request holds."""
    holding = engine.scheduler.cache.holding(request_id)
    for layer in engine.runner.memory:
        if layer.k_cache is not None and layer.v_cache is not None:
            layer.k_cache[list(holding.block_table)] = NAN
            layer.v_cache[list(holding.block_table)] = NAN
        if layer.conv_states is not None and layer.ssm_states is not None:
            layer.conv_states[list(holding.references())] = NAN
            layer.ssm_states[list(holding.references())] = NAN


def record_logits(engine: Engine) -> list[torch.Tensor]:
    """All logits that the model gives from now on."""
    model, seen = engine.runner.model, []

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        values = type(model).logits(model, hidden)
        seen.append(values.clone())
        return values

    model.logits = logits  # type: ignore[method-assign]
    return seen


def small_engine(
    name: str, mode: str = "auto", graph_mode: str = "full_and_piecewise", num_blocks: int = 8, num_slots: int = 6
) -> Engine:
    """With three rows and, if the model has blocks, too few of them for three requests. Graphs hold every step that
    the mode has graphs for, most of them with padding."""
    settings = {"max_model_len": 96, "max_num_seqs": 3, "max_num_batched_tokens": 24, "state_block_size": 16}
    graphs = {"graph_mode": graph_mode} | ({} if graph_mode == "none" else GRAPH_SIZES)
    engine = make_engine(name, state_cache_mode=mode, cache_memory="1MiB", **settings, **graphs)
    shrink(engine, num_blocks, num_slots)
    return engine


GRAPH_SIZES = {"capture_sizes": (3, 24), "capture_rows": (3,)}

TEXT = random_prompt(64, seed=50)
OTHER = random_prompt(64, seed=51)

ARRIVALS: dict[int, tuple[str, list[int], int]] = {
    0: ("a", TEXT[:50], 40),
    2: ("b", OTHER[:7], 60),
    3: ("c", TEXT[:33], 12),
    9: ("d", OTHER[:20], 20),
    11: ("e", TEXT[:40] + OTHER[:5], 3),
    90: ("f", OTHER[:60], 20),
    92: ("g", OTHER[:60], 10),
    125: ("h", TEXT[:50], 20),
    126: ("i", TEXT[:50] + OTHER[:3], 20),
    170: ("j", TEXT[:50], 6),
}
"""Step -> name, prompt and number of tokens. Their prompts have beginnings in common."""


def run(engine: Engine, after_step: Callable[[Engine], None]) -> dict[str, tuple[str | None, list[int]]]:
    """Requests join, leave, are aborted and preempted, hit and are evicted. -> how each ended, and its tokens."""
    after_step(engine)
    ended: dict[str, tuple[str | None, list[int]]] = {}
    for step in range(400):
        if step in ARRIVALS:
            name, prompt, new = ARRIVALS[step]
            params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
            engine.add(prompt, params, request_id=name)
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
        if step > max(ARRIVALS) and not engine.has_unfinished:
            return ended
    raise AssertionError("the requests did not come to an end")


@pytest.mark.parametrize(("name", "mode", "num_slots", "graph_mode"), SMALL_ENGINES_BY_GRAPH_MODE)
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
    for given, wanted in zip(logits, expected_logits, strict=True):
        assert given.isfinite().all()
        assert torch.equal(given, wanted)
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


def assert_written(engine: Engine) -> None:
    """What the index holds is finite."""
    index = engine.scheduler.cache.store.index
    blocks = [entry.block for entry in index]
    slots = [checkpoint.slot for checkpoint in index.checkpoints]
    assert blocks
    for layer in engine.runner.memory:
        if layer.k_cache is not None and layer.v_cache is not None:
            assert layer.k_cache[blocks].isfinite().all()
            assert layer.v_cache[blocks].isfinite().all()
        if layer.conv_states is not None and layer.ssm_states is not None:
            assert layer.conv_states[slots].isfinite().all()
            assert layer.ssm_states[slots].isfinite().all()


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
