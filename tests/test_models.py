"""Every architecture against transformers, below the engine: one row through the model's forward."""

from __future__ import annotations

import pytest
import torch

from ostinato.engine.inputs import step_inputs
from ostinato.layers.build import Build
from ostinato.layers.step import LayerMemory
from ostinato.models.base import CausalLM
from ostinato.models.loader import load_weights
from ostinato.models.registry import build_model
from ostinato.ops import select_ops
from ostinato.plan.model import ModelSpec
from ostinato.plan.source import model_spec, read_config
from ostinato.schedule.batch import Batch, Row
from tests.checkpoints import RECIPES, checkpoint, oracle_logits, random_prompt

BLOCK_SIZE = 16
PROMPT = 150
CPU = torch.device("cpu")


def load(name: str) -> tuple[CausalLM, ModelSpec]:
    directory = checkpoint(name)
    spec = model_spec(read_config(directory))
    model = build_model(Build(select_ops({}), torch.float32, CPU), spec)
    load_weights(model, directory)
    return model, spec


def poisoned_memory(spec: ModelSpec) -> list[LayerMemory]:
    """Blocks for one prompt and three slots, all NaN: what was not written must not be read."""
    nan = float("nan")
    memory = []
    for layer in spec.layers:
        parts = {}
        if layer.attention is not None:
            shape = (
                PROMPT // BLOCK_SIZE + 2,
                BLOCK_SIZE,
                layer.attention.num_kv_heads,
                layer.attention.head_dim,
            )
            parts |= {"k_cache": torch.full(shape, nan), "v_cache": torch.full(shape, nan)}
        if layer.mamba2 is not None:
            mamba2 = layer.mamba2
            ssm = (mamba2.num_heads, mamba2.head_dim, mamba2.state_size)
            parts["conv_states"] = torch.full((3, mamba2.conv_kernel - 1, mamba2.conv_dim), nan)
            parts["ssm_states"] = torch.full((3, *ssm), nan)
        memory.append(LayerMemory(**parts))
    return memory


@torch.inference_mode()
def logits_in_steps(name: str, cuts: list[int]) -> torch.Tensor:
    """Logits of the prompt, computed in steps that end at `cuts`; one-token steps are decode rows."""
    model, spec = load(name)
    memory = poisoned_memory(spec)
    prompt = random_prompt(PROMPT, seed=1)
    parts, start = [], 0
    for end in [*cuts, PROMPT]:
        table = tuple(range(1, -(-end // BLOCK_SIZE) + 1))
        row = Row("r", tuple(prompt[start:end]), start, table, read_slot=2 if start else 0, write_slots=(2,))
        batch = Batch((row,), num_decode_rows=int(start > 0 and end - start == 1))
        parts.append(model.logits(model(step_inputs(batch, BLOCK_SIZE, CPU), memory)))
        start = end
    return torch.cat(parts)


@pytest.mark.parametrize("cuts", [[], [37, 38, 101, 149]], ids=["whole", "in odd chunks and single tokens"])
@pytest.mark.parametrize("name", RECIPES)
def test_logits_equal_transformers(name: str, cuts: list[int]) -> None:
    expected = oracle_logits(name, random_prompt(PROMPT, seed=1))
    error = (logits_in_steps(name, cuts) - expected).abs().max() / expected.abs().max()
    assert error < 1e-5


@pytest.mark.parametrize("name", RECIPES)
def test_the_spec_counts_the_bytes_that_the_model_allocates(name: str) -> None:
    spec = model_spec(read_config(checkpoint(name)))
    for dtype in ("float32", "bfloat16"):
        build = Build(select_ops({}), getattr(torch, dtype), torch.device("meta"))
        weights = list(build_model(build, spec).parameters())
        assert sum(weight.numel() for weight in weights) == spec.num_parameters
        assert sum(weight.numel() * weight.element_size() for weight in weights) == spec.weight_bytes(dtype)
