"""What encoding images takes, eagerly and by graphs: as much as the plan counts at the most, and not far less."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.native_sets import runnable_sets

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what memory is made of is Linux's business")

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "tie_word_embeddings": True,
    "text_config": {
        "vocab_size": 1000,
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 512,
        "max_position_embeddings": 4096,
        "rope_scaling": {"rope_type": "default", "mrope_section": [12, 10, 10], "mrope_interleaved": True},
    },
    "vision_config": {
        "depth": 2,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_heads": 4,
        "out_hidden_size": 256,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [0],
    },
}

ENCODE = """
import ctypes, json, sys
from pathlib import Path
import torch
from ostinato import EngineConfig
from ostinato.runner.graph_setup import make_encoder_graphs
from ostinato.layers.allocation import WeightAllocator
from ostinato.ops.arrays import TorchArrays
from ostinato.ops.step_inputs import EncoderInputs
from ostinato.ops.dispatch import select_ops
from ostinato.plan.device.detect import detect
from ostinato.models.loader import build_model
from ostinato.plan.plan import make_plan
from ostinato.models.checkpoint import load_spec

def kibibytes(name):
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1])

def images(tokens):
    count, elements = 4 * tokens, spec.vision.patch_elements
    pixels = torch.zeros(count, elements, dtype=getattr(torch, settings["dtype"]))
    weights, places = torch.zeros(count, 4), torch.zeros(2, count, 4).long()
    positions, starts = places[1, :, :2].contiguous(), torch.tensor([0, count]).int()
    return EncoderInputs(patches=pixels, taps=places[0], tap_weights=weights, positions=positions, starts=starts)

directory, settings = sys.argv[1], json.loads(sys.argv[2])
torch.set_num_threads(1)
config = EngineConfig(model=directory, random_weights=True, threads=1, encoder_graph_mode="always", **settings)
spec, device = load_spec(config), detect("cpu")
plan = make_plan(config, spec, device)
ops = select_ops({op: choice.implementation for op, choice in plan.kernels.items()}, device.native.isa)
model = build_model(WeightAllocator(ops, TorchArrays("cpu"), settings["dtype"]), spec)
with torch.inference_mode():
    for parameter in model.parameters():
        parameter.zero_()
    model.encode(images(64))  # what torch takes once
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = kibibytes("VmRSS")
    model.encode(images(plan.encoder.max_item_tokens))
    peak = 1024 * (kibibytes("VmHWM") - before)
    graphs = make_encoder_graphs(plan.encoder, spec.vision, model)
    graphs.capture_all()
print(json.dumps([peak, plan.encoder.activation_bytes, graphs.num_bytes, plan.encoder.graph_bytes]))
"""


NATIVE = pytest.mark.skipif(not runnable_sets(), reason="none is built")


@pytest.mark.parametrize(
    ("dtype", "kernels"),
    [
        ("bfloat16", "reference"),
        pytest.param("bfloat16", "native", marks=[NATIVE, pytest.mark.long]),
        pytest.param("float32", "native", marks=NATIVE),
        pytest.param("float32", "reference", marks=pytest.mark.long),
    ],
)
def test_encoding_takes_no_more_than_was_planned_and_graphs_neither(tmp_path: Path, dtype: str, kernels: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    settings = {"dtype": dtype, "kernels": kernels, "max_num_batched_tokens": 1024, "cache_memory": "32MiB"}
    run = subprocess.run(
        [sys.executable, "-c", ENCODE, str(tmp_path), json.dumps(settings)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    peak, planned, of_graphs, planned_graphs = json.loads(run.stdout.splitlines()[-1])
    assert planned / 5 < peak <= planned
    assert planned_graphs / 1.01 < of_graphs <= planned_graphs
