"""What the tests on a GPU share: engines with every fast path on, and steps whose tokens are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ostinato import EngineConfig
from ostinato.engine.core import EngineCore
from ostinato.scheduler.batch import Batch, BatchRow
from tests.support.parity import make_engine


def fast_engine(name: str, device: str, **settings: Any) -> EngineCore:
    """With graphs for every step, captured when first needed, and the kernels that the plan chooses. A step that the
    plan has a graph for and that runs eagerly is an error."""
    sizes = {"max_num_batched_tokens": 64, "max_capture_size": 64, "strict": True, "capture": "lazy"}
    return make_engine(name, device=device, **(sizes | settings))


def plain_engine(name: str, device: str, **settings: Any) -> EngineCore:
    """The definition of right on the same device: references, eagerly."""
    return make_engine(name, device=device, kernels="reference", graph_mode="none", **settings)


def without_overlap() -> dict[str, Any]:
    """The setting for tests that look into memory between two steps, when none may be under way."""
    return {"overlap": "off"} if "overlap" in EngineConfig.model_fields else {}


def assert_full_graphs(engine: EngineCore) -> None:
    """Decode steps ran as full graphs, and nothing eagerly."""
    steps = engine.stats()["graphs"]["steps"]
    assert steps["full"] > 0
    assert steps["eager"] == 0


@torch.inference_mode()
def forced_logits(engine: EngineCore, texts: Sequence[Sequence[int]], lengths: Sequence[int]) -> torch.Tensor:
    """[1 + steps, rows, vocabulary] float32: logits behind prompts, the first `lengths` tokens of each text, computed
    in one ragged step; and then behind every further token, in steps of all rows.

    All texts have as many tokens behind their prompts.
    """
    runner, memory = engine.runner, engine.plan.memory
    blocks = -(-max(map(len, texts)) // runner.block_size) if memory.num_blocks else 0
    assert blocks * len(texts) < max(memory.num_blocks, 1)
    window_blocks = -(-max(map(len, texts)) // runner.block_size) if memory.num_window_blocks else 0
    assert window_blocks * len(texts) < max(memory.num_window_blocks, 1)

    def row(number: int, start: int, end: int) -> BatchRow:
        table = tuple(range(1 + number * blocks, 1 + (number + 1) * blocks))
        slot = 1 + number if memory.num_slots else 0
        row = BatchRow(str(number), tuple(texts[number][start:end]), start, table, slot if start else 0, (slot,))
        return row._replace(
            window_block_table=tuple(range(1 + number * window_blocks, 1 + (number + 1) * window_blocks))
        )

    rows = range(len(texts))
    hidden = runner.execute_model(Batch(tuple(row(i, 0, lengths[i]) for i in rows), 0)).hidden
    ends = torch.tensor(lengths, device=hidden.device).cumsum(0) - 1
    logits = [runner.model.compute_logits(hidden[ends]).float().cpu()]
    for step in range(len(texts[0]) - lengths[0]):
        batch = Batch(tuple(row(i, lengths[i] + step, lengths[i] + step + 1) for i in rows), len(texts))
        logits.append(runner.model.compute_logits(runner.execute_model(batch).hidden[: len(texts)]).float().cpu())
    return torch.stack(logits)
