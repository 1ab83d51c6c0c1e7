"""Whole models with every Triton kernel: steps and images give what references give."""

from __future__ import annotations

import pytest
import torch

from ostinato.layers.allocation import WeightAllocator
from ostinato.models.checkpoint import model_spec, read_config
from ostinato.models.loader import build_model, load_weights
from ostinato.ops.arrays import TorchArrays
from ostinato.ops.dispatch import Ops, select_ops
from ostinato.ops.operations import OPERATIONS
from ostinato.runner.inputs import make_step_inputs
from ostinato.scheduler.batch import Batch, BatchRow
from tests.models.test_models import BLOCK_SIZE, CPU, poisoned_memory
from tests.support.checkpoints import checkpoint
from tests.support.triton_kernels import DEVICE, require_triton
from tests.support.vl_models import encoder_inputs, random_items, vl_model, vl_spec

require_triton()

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="cache and steps of these tests lie in the CPU's memory")

MODELS = ("nemotron_h_dense", "qwen3")
"""Their layers are all kinds but experts. In the interpreter a model takes ten seconds."""

STEPS = (
    Batch((BatchRow("p", (5, 6, 9), 0, (1,), 0, (1,)), BatchRow("q", (3,), 0, (2,), 0, (2,))), 0),
    Batch((BatchRow("p", (7,), 3, (1,), 1, (1,)), BatchRow("q", (4,), 1, (2,), 2, (2,))), 2),
)
"""Prompts of two rows, then a token more of each."""


def triton_ops() -> Ops:
    """Triton's kernels; the reference of an operation that has none, which no model here calls."""
    return select_ops({name: "triton" for name, row in OPERATIONS.items() if row.triton is not None})


def logits_of(name: str, ops: Ops) -> torch.Tensor:
    """Of the last token of both rows after each step."""
    spec = model_spec(read_config(checkpoint(name)))
    model = build_model(WeightAllocator(ops, TorchArrays("cpu"), "float32"), spec)
    load_weights(model, checkpoint(name))
    memory = poisoned_memory(spec)
    with torch.inference_mode():
        return torch.cat(
            [model.compute_logits(model(make_step_inputs(batch, BLOCK_SIZE, CPU), memory)[-2:]) for batch in STEPS]
        )


@pytest.mark.parametrize("name", MODELS)
def test_steps_of_a_model(name: str) -> None:
    right = logits_of(name, select_ops({}))
    assert right.isfinite().all()
    torch.testing.assert_close(logits_of(name, triton_ops()), right, rtol=1e-4, atol=1e-4 * float(right.abs().max()))


@pytest.mark.parametrize("name", ["qwen3_vl", "lfm3_vl"])
@pytest.mark.slow
def test_images_of_an_encoder(name: str) -> None:
    vision = vl_spec(name).vision
    assert vision is not None
    inputs = encoder_inputs(random_items(name, [(4, 6)], seed=0), vision)
    own, right = (vl_model(name, ops).encode(inputs) for ops in (triton_ops(), select_ops({})))
    torch.testing.assert_close(own, right, rtol=1e-4, atol=1e-4 * float(right.abs().max()))
