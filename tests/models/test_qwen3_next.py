"""Qwen3-Next and Qwen3.5 with experts: what their checkpoints hold otherwise than the model."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ostinato import ModelError
from ostinato.formats.mapped_files import SINGLE
from ostinato.layers.allocation import WeightAllocator
from ostinato.models.checkpoint import model_spec, read_config
from ostinato.models.loader import build_model, deinterleaved_index, load_weights
from ostinato.ops.arrays import TorchArrays
from ostinato.ops.dispatch import select_ops
from ostinato.plan.quantization import Quantization
from tests.models.test_qwen3_5 import HUB
from tests.support.checkpoints import checkpoint, oracle
from tests.support.loading import load_checkpoint


def test_rows_that_take_turns_lie_together() -> None:
    # Two turns of parts with one, three and two rows.
    assert deinterleaved_index(12, (1, 3, 2)).tolist() == [0, 6, 1, 2, 3, 7, 8, 9, 4, 5, 10, 11]


def test_projections_by_key_head_give_what_transformers_takes_apart() -> None:
    theirs = oracle("qwen3_next").model.layers[0].linear_attn
    ours = load_checkpoint(checkpoint("qwen3_next")).backbone.layers[0].mixer
    x = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        parts = theirs.fix_query_key_value_ordering(theirs.in_proj_qkvz(x), theirs.in_proj_ba(x))
    query, key, value, z, b, a = (part.reshape(5, -1) for part in parts)
    torch.testing.assert_close(ours.in_proj(x[0]), torch.cat((query, key, value, z), dim=-1))
    torch.testing.assert_close(ours.in_proj_ba(x[0]), torch.cat((b, a), dim=-1))


def test_the_scales_of_quantised_rows_go_with_them() -> None:
    plain = load_checkpoint(checkpoint("qwen3_next")).backbone.layers[0].mixer.in_proj
    eight = load_checkpoint(checkpoint("qwen3_next"), Quantization()).backbone.layers[0].mixer.in_proj
    assert eight.weight.dtype == torch.int8
    torch.testing.assert_close(eight.weight * eight.weight_scale[:, None], plain.weight, atol=0.01, rtol=0)


@pytest.mark.parametrize("name", ["qwen3_5_moe_text", "qwen3_next"])
def test_experts_may_lie_one_by_one_or_as_stacks(name: str, tmp_path: Path) -> None:
    copy = tmp_path / "stacked"
    shutil.copytree(checkpoint(name), copy)
    tensors = load_file(copy / SINGLE)
    for layer in range(3):
        prefix = f"model.layers.{layer}.mlp.experts."
        if f"{prefix}0.up_proj.weight" not in tensors:
            continue
        each = [
            {part: tensors.pop(f"{prefix}{i}.{part}_proj.weight") for part in ("gate", "up", "down")} for i in range(6)
        ]
        tensors[f"{prefix}gate_up_proj"] = torch.stack([torch.cat((e["gate"], e["up"])) for e in each])
        tensors[f"{prefix}down_proj"] = torch.stack([e["down"] for e in each])
    assert any(key.endswith("gate_up_proj") for key in tensors)
    save_file(tensors, copy / SINGLE, metadata={"format": "pt"})
    one_by_one, stacked = (
        dict(load_checkpoint(directory).named_parameters()) for directory in (checkpoint(name), copy)
    )
    assert one_by_one.keys() == stacked.keys()
    assert all(torch.equal(one_by_one[key], stacked[key]) for key in stacked)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers = 2; supported: 0 and 1"),
        (
            {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": True},
            "mtp_use_dedicated_embeddings = True; supported: false",
        ),
        ({"attn_output_gate": False}, "attn_output_gate = False; supported: true"),
    ],
)
def test_heads_and_gates_that_are_not_implemented_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_spec(HUB | change)


def test_a_head_has_one_layer_with_attention_and_experts_where_the_model_has_them() -> None:
    plain = model_spec(HUB | {"mtp_num_hidden_layers": 1}).head
    sparse = model_spec(
        HUB | {"model_type": "qwen3_next", "num_nextn_predict_layers": 1, "num_experts": 8, "num_experts_per_tok": 2}
    ).head
    assert plain is not None
    assert sparse is not None
    [of_plain], [of_sparse] = plain.layers, sparse.layers
    assert of_plain.attention == of_sparse.attention is not None
    assert of_plain.experts is None
    assert of_sparse.experts is not None
    assert plain.hidden_elements == HUB["hidden_size"]
    assert model_spec(HUB).head is None


@pytest.mark.parametrize(("said", "has_head"), [({}, True), ({"num_nextn_predict_layers": 0}, False)])
def test_a_qwen3_next_config_that_does_not_tell_of_its_head_has_one(said: dict[str, Any], has_head: bool) -> None:
    config = HUB | {"model_type": "qwen3_next", "num_experts": 8, "num_experts_per_tok": 2} | said
    assert (model_spec(config).head is not None) == has_head


def test_a_head_that_a_checkpoint_lacks_is_named_where_it_is_to_draft() -> None:
    directory = checkpoint("qwen3_next")
    config = {name: value for name, value in read_config(directory).items() if name != "num_nextn_predict_layers"}
    spec = model_spec(config)
    model = build_model(
        WeightAllocator(select_ops({}), TorchArrays("cpu"), "float32"), replace(spec, drafter=spec.head)
    )
    with pytest.raises(ModelError, match=r"missing \(\d+\): mtp\.fc\.weight"):
        load_weights(model, directory)
