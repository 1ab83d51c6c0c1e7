"""Padding is harmless to images: the null cell, cells that nobody holds and what graphs compute in reach no logit, and
encoding writes nothing but the cells of its images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ostinato.engine.core import EngineCore
from ostinato.graphs.tape import TapeBackend
from ostinato.scheduler.batch import Batch, StepResult
from tests.support.poison import NAN, assert_same_logits, poison, record_logits
from tests.support.tensors import as_tensor
from tests.support.vision_parity import Case, add, check, decided_case, images, make_engine, text, video

GRAPHS: dict[str, dict[str, Any]] = {
    "none": {},
    "piecewise": {"capture_sizes": (40,)},
    "full_and_piecewise": {"capture_sizes": (40,), "capture_rows": (3,)},
}

ARRIVALS = {
    0: (text(9), images((6, 8)), text(12)),
    1: (text(40),),
    2: (images((8, 8), seed=3), text(4), images((2, 20), (10, 4)), text(7)),
    8: (text(6), video(3, (6, 4)), text(8)),
    40: (text(9), images((6, 8)), text(14)),
    41: (text(3), images((6, 8)), text(5)),
    42: (text(1), images((6, 8)), text(4)),
}
"""Step -> the request that comes then."""


def small_engine(name: str, graph_mode: str, encoder_graph_mode: str) -> EngineCore:
    """With chunks that cut images, and cells for fewer images than there are. Every step has padding."""
    own: dict[str, Any] = {"encoder_graph_mode": encoder_graph_mode}
    if encoder_graph_mode != "none":
        own |= {"encoder_token_budgets": (20, 40), "encoder_max_items_per_batch": 3}
    return make_engine(
        name, max_num_seqs=3, max_num_batched_tokens=29, encoder_cache_tokens=24, graph_mode=graph_mode, **own,
        **GRAPHS[graph_mode],
    )  # fmt: skip


@torch.inference_mode()
def poison_all(engine: EngineCore) -> None:
    """The cache, the encoder cache, and what graphs compute in and read, those of the encoder too."""
    poison(engine)
    encoder = engine.runner.encoder_graphs
    assert encoder is not None
    if encoder._buffers is not None:
        assert isinstance(encoder._backend, TapeBackend)
        encoder._backend.arena.poison()
        as_tensor(encoder._buffers.tensors["patches"])[:] = NAN
        as_tensor(encoder._buffers.tensors["tap_weights"])[:] = NAN


def watch_cells(engine: EngineCore) -> None:
    """From now on, every step is checked to leave alone all cells but those of the images that it encodes."""
    run_batch, [cells] = (
        engine.runner.execute,
        [as_tensor(each.media) for each in engine.runner.layer_memory if each.media is not None],
    )

    def watched(batch: Batch) -> StepResult:
        own = [cell for image in batch.images_to_encode for cell in image.cells]
        others = [cell for cell in range(len(cells)) if cell not in own]
        before = cells[others].view(torch.int32).clone()
        result = run_batch(batch)
        assert torch.equal(cells[others].view(torch.int32), before), "a step has written to another image's cells"
        return result

    engine.runner.execute = watched  # type: ignore[method-assign]


def serve(engine: EngineCore, cases: dict[int, Case], after_step: Callable[[EngineCore], None]) -> None:
    outputs = []
    after_step(engine)
    for step in range(400):
        if step in cases:
            outputs.append((cases[step], add(engine, cases[step])))
        if step in (3, 12):
            engine.scheduler.preempt(engine.scheduler.queues.running[0].request_id)
        engine.step()
        engine.scheduler.check_integrity()
        after_step(engine)
        if step > max(cases) and not engine.has_unfinished:
            break
    for case, output in outputs:
        check(case, output)


@pytest.mark.parametrize("encoder_graph_mode", ["none", "always"])
@pytest.mark.parametrize("graph_mode", GRAPHS)
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_vl", "qwen3_vl_moe"])
@pytest.mark.slow
def test_what_nobody_has_written_never_reaches_a_logit(name: str, graph_mode: str, encoder_graph_mode: str) -> None:
    """The same steps with and without poison after each of them give the same bits."""
    plain, poisoned = (small_engine(name, graph_mode, encoder_graph_mode) for _ in range(2))
    watch_cells(poisoned)
    expected, given = record_logits(plain), record_logits(poisoned)
    cases = {step: decided_case(name, parts) for step, parts in ARRIVALS.items()}
    serve(plain, cases, lambda _: None)
    serve(poisoned, cases, poison_all)
    assert_same_logits(given, expected)
    counters = poisoned.stats()["encoder"]["cache"]
    assert counters["evicted_items"] > 0
    assert counters["hits"] > 0


def test_the_poison_is_where_the_other_tests_believe_it_to_be() -> None:
    """Reading a cell that is poisoned would be seen."""
    engine = small_engine("qwen3_vl", "none", "none")
    case = decided_case("qwen3_vl", ARRIVALS[0])
    logits = record_logits(engine)
    output = add(engine, case, prompt_logprobs=True)
    poison_all(engine)
    assert engine.runner.layer_memory[-1].media is not None
    assert as_tensor(engine.runner.layer_memory[-1].media).isnan().all()
    run_batch, cells = engine.runner.execute, as_tensor(engine.runner.layer_memory[-1].media)

    def spoiled(batch: Batch) -> StepResult:
        # As an encoder does that gives NaN for one token.
        encoding = engine.runner.image_encoder
        assert encoding is not None
        if batch.images_to_encode:
            encoding.run(batch.images_to_encode)
            cells[batch.images_to_encode[0].cells[3]] = NAN
        return run_batch(replace(batch, images_to_encode=()))

    engine.runner.execute = spoiled  # type: ignore[method-assign]
    while engine.has_unfinished:
        engine.step()
    assert output.error is not None
    assert logits[-1].isnan().any()
