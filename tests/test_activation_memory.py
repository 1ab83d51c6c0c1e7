"""What steps take beside weights and cache: as much as the plan counts at the most, and not far less."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import checkpoint
from tests.native_sets import runnable_sets

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what memory is made of is Linux's business")

SERVE = """
import ctypes, json, sys
from pathlib import Path
from ostinato import EngineConfig, SamplingParams
from ostinato.engine.engine import Engine

def kibibytes(name):
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1])

directory, settings, params = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
settings |= {"random_weights": True, "graph_mode": "none", "enable_prefix_caching": False, "cache_memory": "32MiB"}
engine = Engine(EngineConfig(model=directory, **settings))
for layer in engine.runner.memory:
    for memory in (layer.k_cache, layer.v_cache, layer.conv_states, layer.ssm_states):
        if memory is not None:
            memory.zero_()

def serve(rows, length):
    for row in range(rows):
        prompt = [(7 * i + row) % 900 + 1 for i in range(length)]
        engine.add(prompt, SamplingParams(max_tokens=2, ignore_eos=True, **params))
    while engine.has_unfinished:
        engine.step()

serve(1, 3)  # what torch takes once
ctypes.CDLL(None).malloc_trim(0)  # what was freed while loading is nobody's
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = kibibytes("VmRSS")
serve(1, settings["max_num_batched_tokens"] - 8)
serve(settings["max_num_seqs"], 5)
print(json.dumps([1024 * (kibibytes("VmHWM") - before), engine.plan.memory.activations]))
"""

ATTENTION = ("llama", {"hidden_size": 512, "intermediate_size": 2048, "head_dim": 64, "vocab_size": 4096})
EXPERTS = (
    "granitemoehybrid",
    {
        "hidden_size": 512,
        "mamba_n_heads": 16,
        "mamba_d_head": 64,
        "shared_intermediate_size": 256,
        "intermediate_size": 512,
        "num_experts_per_tok": 4,
        "vocab_size": 4096,
    },
)
LOGITS = ("llama", {"vocab_size": 131072})
SORTED = {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "logprobs": 2, "presence_penalty": 0.1}
KERNELS = ["reference", pytest.param("native", marks=pytest.mark.skipif(not runnable_sets(), reason="none is built"))]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("model", "settings", "params"),
    [
        pytest.param(ATTENTION, {"dtype": "float32"}, {}, id="attention"),
        pytest.param(EXPERTS, {"dtype": "bfloat16"}, {}, id="experts"),
        pytest.param(EXPERTS, {"dtype": "float32", "quantization": "int8_g128"}, {}, id="experts of 8 bits"),
        pytest.param(LOGITS, {"dtype": "float32", "max_num_seqs": 48}, SORTED, id="logits"),
    ],
)
def test_steps_take_no_more_than_is_planned_for_the_kernels_that_run(
    model: tuple[str, dict[str, int]], settings: dict[str, Any], params: dict[str, Any], kernels: str, tmp_path: Path
) -> None:
    name, sizes = model
    shutil.copytree(checkpoint(name), tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | sizes | {"max_position_embeddings": 2048}))
    settings = {"max_num_batched_tokens": 1024, "max_num_seqs": 8, "threads": 1, "kernels": kernels} | settings
    command = [sys.executable, "-c", SERVE, str(tmp_path), json.dumps(settings), json.dumps(params)]
    taken, planned = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert taken > 2**23, "the case is too small to tell"
    assert taken <= planned
    assert planned <= 6 * taken  # not every reference makes a float32 copy of all that it reads
