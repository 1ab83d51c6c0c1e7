"""A model's steps with Triton kernels: a prompt, then a decode row, give what the references give."""

from __future__ import annotations

import pytest
import torch

from ostinato.engine.run.inputs import step_inputs
from ostinato.layers.build import Build
from ostinato.models.checkpoint import model_spec, read_config
from ostinato.models.loader import build_model, load_weights
from ostinato.ops.facts import OPERATIONS
from ostinato.ops.kernels import select_ops
from ostinato.schedule.batch import Batch, Row
from tests.models.test_models import BLOCK_SIZE, CPU, poisoned_memory
from tests.support.checkpoints import checkpoint
from tests.support.triton_kernels import assert_close, require_triton

require_triton()

NAME = "nemotron_h"
PROMPT = Row("r", tuple(range(5, 12)), 0, (1, 2), 0, (2,))
NEXT = Row("r", (7,), 7, (1, 2), 2, (2,))


@torch.inference_mode()
def logits(name: str, choices: dict[str, str]) -> list[torch.Tensor]:
    """Of each step, from a cache that is NaN wherever nothing was written."""
    spec = model_spec(read_config(checkpoint(name)))
    model = build_model(Build(select_ops(choices), torch.float32, CPU), spec)
    load_weights(model, checkpoint(name))
    memory = poisoned_memory(spec)
    steps = (Batch((PROMPT,), 0), Batch((NEXT,), 1))
    return [model.logits(model(step_inputs(step, BLOCK_SIZE, CPU), memory)) for step in steps]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the steps are on the CPU, where kernels are interpreted")
def test_steps_with_triton_kernels_give_the_logits_of_references() -> None:
    choices = {op: "triton" for op, row in OPERATIONS.items() if row.triton is not None}
    for own, right in zip(logits(NAME, choices), logits(NAME, {}), strict=True):
        assert_close(own, right)
