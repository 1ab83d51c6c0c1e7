"""What steps take beside weights and cache: as much as the plan counts at the most, and not far less."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ostinato import EngineConfig, SamplingParams
from ostinato.engine.core import EngineCore
from ostinato.ops.arrays import NUMPY
from ostinato.plan.memory.activations import sampled_positions, scratch_bytes
from ostinato.sampling.guide import Guide
from tests.support.allocations import peaks
from tests.support.checkpoints import checkpoint
from tests.support.native_sets import skip_unless_planned
from tests.support.recipes import RECIPES

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
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "logprobs": 2, "presence_penalty": 0.1}
KERNELS = ["reference", "native"]


OF_PYTHON = 2**20
"""What Python's own objects may take besides: requests, outputs, texts."""


def engine_of(directory: Path, **settings: Any) -> EngineCore:
    limits = {"max_model_len": 512, "max_num_batched_tokens": 256, "max_num_seqs": 8, "cache_memory": "16MiB"}
    plain = {"model": str(directory), "random_weights": True, "threads": 1, "graph_mode": "none"}
    return EngineCore(EngineConfig(**plain | limits | settings))


def serve(engine: EngineCore, rows: int, length: int, **params: Any) -> None:
    for row in range(rows):
        prompt = [(7 * i + row) % (engine.spec.vocab_size - 1) + 1 for i in range(length)]
        engine.add_request(prompt, SamplingParams(**{"max_tokens": 2, "ignore_eos": True} | params))
    while engine.has_unfinished:
        [error] = {output.error for output in engine.step()} or {None}
        assert error is None


def taken_bytes(engine: EngineCore) -> Mapping[str, tuple[int, int]]:
    """By what is served: the most that was asked for at once, of torch and of numpy. The first one is the first
    request."""
    settings = engine.plan.settings
    most, rows, longest = settings.max_num_batched_tokens, settings.max_num_seqs, settings.max_model_len - 2

    def four_prompts() -> None:
        """Which differ from their first token on, and of which one step holds a part."""
        for number in range(4):
            engine.add_request([number + 1] * longest, SamplingParams(max_tokens=2, ignore_eos=True))
        while engine.has_unfinished:
            engine.step()

    served = {
        "a first request": lambda: serve(engine, 1, 3),
        "a prompt of as many tokens as a step may have": lambda: serve(engine, 1, min(most, longest)),
        "as many rows as a step may have": lambda: serve(engine, rows, 5),
        "sampling with everything": lambda: serve(engine, rows, 5, **SAMPLED),
        "log-probabilities of a prompt": lambda: serve(engine, 1, min(most, longest), prompt_logprobs=2),
        "long prompts, one behind the other": four_prompts,
    }
    return {name: peaks(work) for name, work in served.items()}


def check(engine: EngineCore, most_times: float) -> None:
    """All that was asked for is planned, beside what native kernels keep, and the plan is at most so many times it."""
    settings, planned = engine.plan.settings, engine.plan.memory.activations
    native = [op for op, choice in engine.plan.kernels.items() if choice.implementation == "native"]
    tokens = settings.max_num_batched_tokens
    positions = sampled_positions(tokens, settings.max_num_seqs, engine.plan.memory.slots_per_request)
    rows = {op: choice.ukernels for op, choice in engine.plan.kernels.items()}
    kept = scratch_bytes(engine.spec, tokens, positions, settings.max_model_len, native, 1, rows)
    taken = taken_bytes(engine)
    own = {
        name: of_numpy - OF_PYTHON if engine.runner.arrays is NUMPY else of_torch
        for name, (of_torch, of_numpy) in taken.items()
    }
    assert {name: size for name, size in own.items() if size > planned - kept} == {}
    assert planned - kept <= most_times * max(map(sum, taken.values()))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("model", "settings", "most_times"),  # the latter for references; all tokens may want one expert, and here do not
    [
        pytest.param(ATTENTION, {"dtype": "float32"}, 2.2, id="attention"),
        pytest.param(EXPERTS, {"dtype": "bfloat16"}, 5, id="experts"),
        pytest.param(EXPERTS, {"dtype": "float32", "quantization": "int8_g128"}, 3, id="experts of 8 bits"),
        pytest.param(LOGITS, {"dtype": "float32", "max_num_seqs": 48}, 2.4, id="logits of many rows"),
        pytest.param(LOGITS, {"dtype": "float32", "max_num_seqs": 2}, 1.3, id="logits of few rows"),
    ],
)
@pytest.mark.slow
def test_steps_take_no_more_than_is_planned_for_the_kernels_that_run(
    model: tuple[str, dict[str, int]], settings: dict[str, Any], most_times: float, kernels: str, tmp_path: Path
) -> None:
    name, sizes = model
    shutil.copytree(checkpoint(name), tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | sizes | {"max_position_embeddings": 2048}))
    skip_unless_planned(kernels)
    check(engine_of(tmp_path, kernels=kernels, **settings), most_times=most_times if kernels == "reference" else 1.7)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.slow
def test_steps_of_every_architecture_take_no_more_than_is_planned(recipe: str, kernels: str) -> None:
    skip_unless_planned(kernels)
    check(
        engine_of(checkpoint(recipe), kernels=kernels, dtype="bfloat16"),
        most_times=3.5 if kernels == "reference" else 1.6,
    )


@pytest.mark.slow
def test_graphs_and_guides_take_no_more_than_is_planned() -> None:
    engine = engine_of(checkpoint("llama"), graph_mode="full_and_piecewise")
    check(engine, most_times=10)  # what a graph computes in its arena is planned for the steps without one
    if engine.tokenizer.has_text:
        guided = sum(peaks(lambda: serve(engine, 4, 9, guide=Guide(regex="[0-9]{8}"), max_tokens=8))) - OF_PYTHON
        assert guided <= engine.plan.memory.activations
