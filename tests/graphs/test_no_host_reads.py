"""No step that a CUDA graph holds reads a value on the host: each model's, on tensors without memory, with the kernels
that the plan chooses on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ostinato import EngineConfig
from ostinato.engine.run.inputs import write_step
from ostinato.models.checkpoint import load_spec
from ostinato.plan.device.catalogue import CATALOGUE
from ostinato.plan.model import ModelSpec
from ostinato.plan.plan import Plan, make_plan
from ostinato.plan.speculation.drafter import with_drafter
from ostinato.schedule.batch import Batch, Row
from tests.support.checkpoints import checkpoint
from tests.support.recipes import HEADED, RECIPES
from tests.support.triton_kernels import require_triton
from tests.support.vl_models import VL_RECIPES, vl_checkpoint
from tests.support.without_memory import (
    BLOCK_SIZE,
    OnDevice,
    collected_launches,
    meta_buffers,
    meta_memory,
    meta_model,
)

require_triton()

MODELS = [*RECIPES, *HEADED, *VL_RECIPES]
DRAFTS = 3


def planned(name: str, **settings: Any) -> tuple[Plan, ModelSpec]:
    directory = vl_checkpoint(name) if name in VL_RECIPES else checkpoint(name)
    settings |= {"speculative": {"method": "mtp", "num_speculative_tokens": DRAFTS}} if name in HEADED else {}
    config = EngineConfig(model=str(directory), dtype="bfloat16", max_num_seqs=4, max_model_len=128, **settings)
    spec = with_drafter(config, load_spec(config))
    plan = make_plan(config, spec, CATALOGUE["h100-80gb"])
    return plan, spec


def decode_rows(count: int, drafts: int) -> Batch:
    rows = [
        Row(str(i), (5,), 20 + i, (1 + 2 * i, 2 + 2 * i), 1 + i, tuple(range(8 + 4 * i, 9 + 4 * i + drafts)))
        for i in range(count)
    ]
    return Batch(tuple(rows), count, drafts)


@pytest.mark.parametrize("name", MODELS)
def test_a_decode_step_reads_nothing_on_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, spec = planned(name)
    model, memory = meta_model(spec, plan.kernels), meta_memory(spec)
    with torch.inference_mode(), collected_launches(monkeypatch) as launches:
        for drafts in (0, DRAFTS):
            buffers = meta_buffers(spec, 4, 16, 1 + DRAFTS)
            step = write_step(buffers, decode_rows(3, drafts), BLOCK_SIZE, [(7,) * drafts] * 3 if drafts else ())
            buffers.pad(3, step.length, 4, 4 * (1 + drafts))
            captured = buffers.view(4, 4 * (1 + drafts), 1 + drafts, 4)
            with OnDevice():
                hidden = model(captured, memory)
                logits = model.logits(hidden)
            assert logits.shape == (4 * (1 + drafts), spec.vocab_size)
    assert launches
