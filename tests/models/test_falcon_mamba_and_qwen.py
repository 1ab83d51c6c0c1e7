"""What Falcon-H1, Mamba-2 and Qwen3 add to the parity of every architecture: flags, spellings, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig

from ostinato.errors import ModelError
from ostinato.layers.allocation import WeightAllocator
from ostinato.models.checkpoint import model_spec, read_config
from ostinato.models.loader import build_model, load_weights
from ostinato.ops.arrays import TorchArrays
from ostinato.ops.dispatch import Ops, select_ops
from ostinato.ops.operations import OPERATIONS
from ostinato.plan.model import ModelSpec
from ostinato.runner.inputs import make_step_inputs
from ostinato.scheduler.batch import Batch, BatchRow
from tests.models.test_models import BLOCK_SIZE, CPU, PROMPT, logits_in_steps, poisoned_memory
from tests.support.checkpoints import RECIPES, checkpoint, oracle_logits, random_prompt

NAMES = ("falcon_h1", "falcon_h1_normed", "mamba2", "qwen3")
CUTS = pytest.mark.parametrize("cuts", [[], [37, 38, 101, 149]], ids=["whole", "in odd chunks and single tokens"])


def spec_with(name: str, **changes: Any) -> ModelSpec:
    return model_spec({**read_config(checkpoint(name)), **changes})


def as_on_the_hub(config: dict[str, Any]) -> dict[str, Any]:
    """The same config with the names that older versions of transformers wrote."""
    old = {**config, "torch_dtype": config["dtype"]}
    del old["dtype"]
    if "rope_parameters" in old:
        scaling = dict(old.pop("rope_parameters"))
        theta, kind = scaling.pop("rope_theta"), scaling.pop("rope_type")
        old |= {"rope_theta": theta, "rope_scaling": None if kind == "default" else {"type": kind, **scaling}}
    if "time_step_limit" in old:
        old["time_step_limit"] = [0.0, float("inf")]
    if "mamba_d_head" in old:
        old["mamba_d_head"] = "auto"
    if config["model_type"] == "mamba2":
        # Written for every checkpoint, also for those whose mixers gate first, and never read.
        old |= {"rms_norm": True, "norm_before_gate": True}
    return old


@pytest.mark.parametrize("name", NAMES)
def test_hub_configs_mean_the_same_as_those_that_transformers_writes(name: str) -> None:
    config = read_config(checkpoint(name))
    assert model_spec(as_on_the_hub(config)) == model_spec(config)


def assert_follows_changes(name: str, cuts: list[int], patch: pytest.MonkeyPatch, **changes: Any) -> None:
    """A recipe with changes, in a part that matters to its logits, still equals transformers."""

    def changed() -> PretrainedConfig:
        config = RECIPES[name]()
        for key, value in changes.items():
            setattr(config, key, value)
        return config

    prompt, variant = random_prompt(PROMPT, seed=1), f"{name} with {sorted(changes)}"
    before = oracle_logits(name, prompt)
    patch.setitem(RECIPES, variant, changed)
    expected = oracle_logits(variant, prompt)
    assert (expected - before).abs().max() > 0.1 * before.abs().max()
    error = (logits_in_steps(variant, cuts) - expected).abs().max() / expected.abs().max()
    assert error < 1e-5


@CUTS
@pytest.mark.parametrize("name", ["falcon_h1", "mamba2"])
def test_a_narrow_time_step_limit_clamps_in_prefill_and_decode(
    name: str, cuts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_follows_changes(name, cuts, monkeypatch, time_step_limit=(0.2, 0.5))


@CUTS
def test_the_gate_of_a_falcon_comes_before_the_norm_where_the_config_says_so(
    cuts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_follows_changes("falcon_h1_normed", cuts, monkeypatch, mamba_norm_before_gate=False)


@pytest.mark.parametrize("name", NAMES)
def test_the_spec_names_the_kernels_that_the_model_calls(name: str) -> None:
    called = set()

    def noting(op: str, function: Any) -> Any:
        def note(*args: Any, **kwargs: Any) -> torch.Tensor:
            called.add(op)
            return function(*args, **kwargs)

        return note

    ops = select_ops({})
    ops = Ops({op: noting(op, getattr(ops, op)) for op in OPERATIONS}, ops.hook)
    spec = spec_with(name)
    model = build_model(WeightAllocator(ops, TorchArrays("cpu"), "float32"), spec)
    load_weights(model, checkpoint(name))
    memory = poisoned_memory(spec)
    prompt, decoding = BatchRow("r", (5, 6), 0, (1,), 0, (2,)), BatchRow("r", (7,), 2, (1,), 2, (2,))
    other = BatchRow("s", (5, 6), 0, (1,), 0, (1,))
    for batch in (Batch((prompt,), 0), Batch((decoding,), 1), Batch((decoding, other), 1)):
        model.compute_logits(model(make_step_inputs(batch, BLOCK_SIZE, CPU), memory))
    assert called == set(spec.ops)


@pytest.mark.parametrize(("in_float32", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_the_residual_of_a_mamba_is_float32_where_the_config_says_so(in_float32: bool, dtype: torch.dtype) -> None:
    spec = spec_with("mamba2", residual_in_fp32=in_float32)
    model = build_model(WeightAllocator(select_ops({}), TorchArrays("cpu"), "bfloat16"), spec)
    load_weights(model, checkpoint("mamba2"))
    residuals = []

    def noting(forward: Any) -> Any:
        def noted(*args: Any) -> torch.Tensor:
            x = forward(*args)
            residuals.append(x.dtype)
            return x

        return noted

    for block in model.backbone.layers:
        block.forward = noting(block.forward)
    row = BatchRow("r", (5, 6, 7), 0, (1,), 0, (2,))
    hidden = model(make_step_inputs(Batch((row,), 0), BLOCK_SIZE, CPU), poisoned_memory(spec))
    assert residuals == [dtype] * 4
    assert hidden.dtype == torch.bfloat16


def test_a_mamba_has_slots_and_no_blocks() -> None:
    spec = spec_with("mamba2")
    assert (len(spec.state_layers), spec.attention_layers, spec.rope) == (4, (), None)


def test_a_mamba_checkpoint_may_name_its_embedding_in_the_singular(tmp_path: Path) -> None:
    tensors = load_file(checkpoint("mamba2") / "model.safetensors")
    embedding = tensors.pop("backbone.embeddings.weight")
    save_file(tensors | {"backbone.embedding.weight": embedding}, tmp_path / "model.safetensors")
    model = build_model(WeightAllocator(select_ops({}), TorchArrays("cpu"), "float32"), spec_with("mamba2"))
    load_weights(model, tmp_path)
    assert torch.equal(model.embedding.weight, embedding)


def test_a_falcon_without_multipliers_scales_by_one() -> None:
    lists = spec_with("falcon_h1", ssm_multipliers=None, mlp_multipliers=None).hyperparameters.multipliers
    assert (lists.ssm, lists.mlp_gate, lists.mlp_down) == ((1.0,) * 5, 1.0, 1.0)


def test_the_inner_size_of_a_falcon_is_its_own_or_the_expanded_hidden_size() -> None:
    assert spec_with("falcon_h1").state_layers[0].intermediate_size == 96
    assert spec_with("falcon_h1", mamba_d_ssm=None, mamba_d_head=16).state_layers[0].intermediate_size == 128


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 3},
        {"use_sliding_window": False, "sliding_window": 32, "max_window_layers": 1},
    ],
    ids=["no size", "begins after the last layer", "not used"],
)
def test_a_sliding_window_that_no_layer_uses_is_accepted(changes: dict[str, Any]) -> None:
    assert spec_with("qwen3", layer_types=None, **changes) == spec_with("qwen3")


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("qwen3", {"hidden_act": "gelu"}, "supported: silu"),
        (
            "qwen3",
            {"layer_types": ["full_attention"] * 4},
            "4 layer_types for num_hidden_layers = 3",
        ),
        ("qwen3", {"layer_types": ["chunked_attention"] * 3}, "supported: full_attention, sliding_attention"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 3}, "use_sliding_window = false; make it true"),
        ("mamba2", {"hidden_act": "gelu"}, "supported: silu"),
        ("mamba2", {"rms_norm": False}, "supported: true"),
        ("mamba2", {"expand": 2}, "expand \\* hidden_size = 128"),
        ("falcon_h1", {"hidden_act": "gelu"}, "supported: silu"),
        ("falcon_h1", {"mamba_d_head": 16}, "mamba_d_ssm = 96"),
        ("falcon_h1", {"ssm_multipliers": [1.0, 2.0]}, "a list of 5 numbers"),
        ("falcon_h1", {"mlp_multipliers": [1.0, "2"]}, "should be a finite number"),
    ],
)
def test_what_a_config_asks_for_and_is_not_supported_is_refused(
    name: str, changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ModelError, match=expected):
        spec_with(name, **changes)
