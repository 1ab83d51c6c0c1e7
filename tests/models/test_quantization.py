"""Models with 8-bit weights: what they take, what is loaded into them, and that every way to run them agrees."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ostinato import ConfigError, EngineConfig, ModelError
from ostinato.engine.core import EngineCore
from ostinato.formats.mapped_files import SINGLE
from ostinato.formats.quantization_config import stored_weights
from ostinato.layers.allocation import BlockView, QuantizedView, WeightAllocator, checkpoint_views
from ostinato.layers.linear import Linear
from ostinato.models.base import CausalLM
from ostinato.models.checkpoint import load_spec, model_spec
from ostinato.models.loader import build_model, load_weights
from ostinato.models.random_weights import randomize_weights
from ostinato.ops.arrays import TorchArrays, dtype_name, host_values
from ostinato.ops.dispatch import select_ops
from ostinato.ops.quant import dequantize as blocks
from ostinato.ops.quant import quantize
from ostinato.plan.device.kernel_support import NativeFacts
from ostinato.plan.model import ModelSpec
from ostinato.plan.plan import Plan, make_plan
from ostinato.plan.quantization import Quantization
from ostinato.verify.logit_loss import compare_logits
from ostinato.verify.reference_run import text_logits
from tests.models.test_checkpoint_specs import LLAMA
from tests.support.checkpoints import checkpoint, random_prompt
from tests.support.engines import complete, greedy
from tests.support.native_sets import runnable_sets
from tests.support.plan_cases import GIB, cpu
from tests.support.quantized_checkpoints import compressed, quantization_config
from tests.support.recipes import HEADED, RECIPES

CPU = torch.device("cpu")
needs_native = pytest.mark.skipif(not runnable_sets(), reason="no native module is built: run make native")


DYNAMIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
"""Activations in 8 bits, as compressed-tensors describes them."""
SMALL = {"quantization": "int8", "activation_dtype": "int8"}


def spec_of(directory: Path, **settings: Any) -> ModelSpec:
    return load_spec(EngineConfig(model=str(directory), **settings))


def build(spec: ModelSpec, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> CausalLM:
    return build_model(WeightAllocator(select_ops({}), TorchArrays(str(device)), dtype_name(dtype)), spec)


def values(model: CausalLM) -> dict[str, torch.Tensor]:
    """What the weights stand for."""
    return {
        name: place if isinstance(place, torch.Tensor) else dequantized(place)
        for name, place in checkpoint_views(model)
    }


def dequantized(place: QuantizedView | BlockView) -> torch.Tensor:
    rows = place.flat()
    if isinstance(rows, BlockView):
        found = blocks.dequantize(rows.name, rows.bytes).view(place.shape)
        return found if rows.order is None else found[..., rows.order.argsort()]
    return quantize.dequantize(rows.weight, rows.scale, rows.group_size).view(place.shape)


# What is quantised, and what it takes


NO_GROUPS_OF_32 = {"granitemoehybrid_dense", "granite_swa", "granitemoe_swa_alone", "lfm3_plain"}
"""Recipes whose rows have 48 elements, or as odd a number, which groups of 32 do not fill."""


@pytest.mark.parametrize("quantization", ["none", "int8", "int8_g128", "int4_g32"])
@pytest.mark.parametrize("name", [*RECIPES, *HEADED])
def test_the_spec_counts_the_bytes_that_a_quantised_model_allocates(name: str, quantization: str) -> None:
    speculative = "mtp:1" if name in HEADED else None
    spec = spec_of(checkpoint(name), quantization=quantization, speculative=speculative)
    for dtype in ("float32", "bfloat16"):
        weights = list(build(spec, getattr(torch, dtype), torch.device("meta")).parameters())
        drafter = 0 if spec.drafter is None else spec.drafter.weight_bytes(dtype)
        assert sum(weight.nbytes for weight in weights) == spec.weight_bytes(dtype) + drafter
    of_quantised = {"none": None, "int4_g32": torch.uint8}.get(quantization, torch.int8)
    if quantization == "int4_g32" and name in NO_GROUPS_OF_32:
        of_quantised = None
    assert {weight.dtype for weight in weights} & {torch.int8, torch.uint8} == ({of_quantised} - {None})


def test_matrices_of_linears_are_quantised_and_nothing_else() -> None:
    model = build(spec_of(checkpoint("nemotron_h_head"), quantization="int8", speculative="mtp:1"))
    places = dict(checkpoint_views(model))
    plain = {name for name, place in places.items() if place.shape[1:] and not isinstance(place, QuantizedView)}
    kinds = {name.rpartition("layers.")[2].partition(".")[2] or name for name in plain}
    assert kinds == {"embeddings.weight", "mixer.gate.weight", "mixer.conv1d.weight"}
    assert isinstance(places["model.layers.1.mixer.experts.3.down_proj.weight"], QuantizedView)
    assert isinstance(places["lm_head.weight"], QuantizedView)
    assert isinstance(places["mtp.layers.0.eh_proj.weight"], QuantizedView)


def test_tied_embeddings_are_quantised_as_the_head_that_they_are() -> None:
    model = build(spec_of(checkpoint("llama"), quantization="int8_g128"))
    assert isinstance(dict(checkpoint_views(model))["model.embed_tokens.weight"], QuantizedView)


def test_a_router_is_never_quantised() -> None:
    model = build(spec_of(checkpoint("granitemoehybrid"), quantization="int8"))
    routers = [place for name, place in checkpoint_views(model) if "router" in name]
    assert routers
    assert not any(isinstance(place, QuantizedView) for place in routers)


@pytest.mark.parametrize(
    ("ignore", "names", "is_covered"),
    [
        ((), ["model.layers.0.mixer.in_proj"], True),
        (("lm_head",), ["lm_head"], False),
        (("lm_head",), ["model.layers.0.mlp.up_proj"], True),
        (("model.layers.1.mixer.in_proj",), ["model.layers.1.mixer.in_proj"], False),
        (("backbone.layers.1.mixer.in_proj",), ["model.layers.1.mixer.in_proj"], False),
        (("model.layers.1.mixer.in_proj",), ["model.layers.11.mixer.in_proj"], True),
        (("re:.*k_proj",), ["model.layers.2.self_attn.q_proj", "model.layers.2.self_attn.k_proj"], False),
        (("re:k_proj",), ["model.layers.2.self_attn.k_proj"], True),
        (("language_model.model.layers.2.mlp.up_proj",), ["model.language_model.layers.2.mlp.up_proj"], False),
        (("model.layers.2.mlp.up_proj",), ["model.language_model.layers.2.mlp.up_proj"], False),
        (("model.language_model.layers.2.mlp.up_proj",), ["model.layers.2.mlp.up_proj"], False),
        (("re:model\\.layers\\.2",), ["model.language_model.layers.2.mlp.up_proj"], False),
        (("re:language_model.model.layers.2",), ["model.layers.2.mlp.up_proj"], False),
        (("language_model.lm_head",), ["lm_head"], False),
        (("model.visual.layers.2.mlp.up_proj",), ["model.language_model.layers.2.mlp.up_proj"], True),
        (("re:.*visual",), ["model.language_model.layers.2.mlp.up_proj"], True),
        (("re:backbone.layers.[0-3]\\.",), ["model.layers.2.mixer.in_proj"], False),
        (("re:.*experts.1.up",), ["m.experts.0.up", "m.experts.0.down", "m.experts.1.up", "m.experts.1.down"], False),
    ],
)
def test_ignored_linears_are_named_or_begin_with_a_pattern(ignore: Any, names: list[str], is_covered: bool) -> None:
    assert Quantization(None, ignore).covers(names) == is_covered


def test_experts_that_a_checkpoint_stacks_are_no_linears_of_it_unless_it_says_so() -> None:
    names = ["model.layers.0.block_sparse_moe.input_linear", "model.layers.0.block_sparse_moe.output_linear"]
    assert Quantization().covers(names, is_stack=True)
    linears = stored_weights({"quantization_config": quantization_config()})
    both = ["Linear", "GraniteMoeHybridParallelExpertsLinear"]
    all_of_them = stored_weights({"quantization_config": quantization_config(group={"targets": both})})
    assert linears is not None
    assert all_of_them is not None
    of_linears, of_all = linears.quantization(read=()), all_of_them.quantization(read=())
    assert of_linears is not None
    assert of_all is not None
    assert not of_linears.covers(names, is_stack=True)
    assert of_all.covers(names, is_stack=True)
    assert of_linears.covers(["model.layers.0.shared_mlp.input_linear"])


# The plan


def test_the_plan_says_what_is_quantised_and_what_that_saves() -> None:
    config = EngineConfig(model=str(checkpoint("bamba")), quantization="int8_g128", dtype="bfloat16")
    plan = make_plan(config, load_spec(config), cpu(8 * GIB))
    assert plan.settings.quantization == Quantization(128)
    [decision] = [decision for decision in plan.decisions if decision.topic == "quantization"]
    assert (decision.requested, decision.effective) == ("int8_g128", "int8_g128")
    for part in ("17 of 17 linear layers", "one scale per 128 elements", "embedding stays", "slower than not"):
        assert part in decision.reason
    assert Plan.from_json(plan.to_json()) == plan
    whole = make_plan(config.with_settings(quantization="none"), load_spec(config), cpu(8 * GIB))
    assert whole.settings.quantization is None
    assert whole.memory.weights > 1.6 * plan.memory.weights
    assert not [decision for decision in whole.decisions if decision.topic == "quantization"]


@pytest.mark.parametrize(
    ("stored", "told"),
    [
        (None, "made while loading; 17 of 17 linear layers and the experts of 4 of 4 layers"),
        (False, "as the checkpoint has them; 16 of 17 linear layers and the experts of 0 of 4 layers"),
        (True, "as the checkpoint has them; 16 of 17 linear layers and the experts of 4 of 4 layers"),
    ],
)
def test_the_plan_says_of_how_many_layers_the_experts_are_quantised(
    stored: bool | None, told: str, tmp_path: Path
) -> None:
    if stored is None:
        config = EngineConfig(model=str(checkpoint("granitemoehybrid")), quantization="int8")
    else:
        compressed("granitemoehybrid", tmp_path, None, "int-quantized", with_stacks=stored)
        config = EngineConfig(model=str(tmp_path))
    plan = make_plan(config, load_spec(config), cpu(8 * GIB))
    [decision] = [decision for decision in plan.decisions if decision.topic == "quantization"]
    assert decision.reason.startswith(told)
    assert "routers, norms and convolutions stay" in decision.reason


def test_the_plan_counts_what_the_engine_loads() -> None:
    for settings in ({"speculative": "mtp:2"}, {"speculative": f"draft:{checkpoint('granitemoehybrid_dense')}:2"}):
        engine = make_engine(checkpoint("nemotron_h_head"), quantization="int8", **settings)
        assert engine.plan.memory.weights == engine.runner.measured["weight_bytes"]


def test_a_checkpoint_turns_it_on_by_itself_and_contradictions_name_what_works(tmp_path: Path) -> None:
    compressed("llama", tmp_path, 32, "pack-quantized")
    config = EngineConfig(model=str(tmp_path))
    plan = make_plan(config, load_spec(config), cpu(8 * GIB))
    assert plan.settings.quantization == Quantization(32, ("re:lm_head", "lm_head"), ignores_stacks=True)
    assert any("as the checkpoint has them" in decision.reason for decision in plan.decisions)
    with pytest.raises(ConfigError, match="one scale per 32") as caught:
        spec_of(tmp_path, quantization="int8")
    assert [(remedy.setting, remedy.value) for remedy in caught.value.remedies] == [
        ("quantization", "auto"), ("quantization", "none"),
    ]  # fmt: skip
    assert spec_of(tmp_path, quantization="none").quantization is None


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"quant_method": "awq"}, "awq"),
        ({"format": "float-quantized"}, "float-quantized"),
        ({"quantization_status": "frozen"}, "frozen"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ({"config_groups": {}}, "config_groups"),
        ({"group": {"targets": ["re:.*mlp.*"]}}, "targets"),
        ({"group": {"input_activations": {"num_bits": 8}}}, "input_activations"),
        ({"group": {"input_activations": DYNAMIC | {"dynamic": False}}}, "'dynamic': False"),
        ({"group": {"input_activations": DYNAMIC | {"strategy": "tensor"}}}, "'strategy': 'tensor'"),
        ({"group": {"input_activations": DYNAMIC | {"symmetric": False}}}, "'symmetric': False"),
        ({"weights": {"num_bits": 3}}, "num_bits = 3"),
        ({"weights": {"type": "float"}}, "type = 'float'"),
        ({"weights": {"symmetric": False}}, "symmetric"),
        ({"weights": {"strategy": "tensor"}}, "strategy"),
        ({"weights": {"actorder": "group"}}, "actorder"),
        ({"weights": {"strategy": "group", "group_size": 24}}, "multiples of 32"),
        ({"ignore": ["re:("]}, "no pattern"),
    ],
)
def test_other_quantisation_is_refused_with_what_can_be_read(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelError, match=told.replace("(", r"\(")) as caught:
        model_spec({**LLAMA, "quantization_config": quantization_config(**changes)})
    assert "supported" in caught.value.message or "pattern" in caught.value.message


# Loading


@pytest.mark.parametrize("group_size", [None, 128])
@pytest.mark.parametrize("name", ["nemotron_h", "granitemoehybrid", "llama"])
def test_weights_are_quantised_tensor_by_tensor(name: str, group_size: int | None) -> None:
    directory = checkpoint(name)
    model = build(spec_of(directory, quantization="int8" if group_size is None else "int8_g128"))
    load_weights(model, directory)
    places = dict(checkpoint_views(model))
    count = 0
    for key, tensor in load_file(directory / SINGLE).items():
        place = places[key.replace("backbone.", "model.")]
        if isinstance(place, QuantizedView):
            weight, scale = quantize.quantize_int8(tensor.flatten(0, -2), group_size)
            assert place.shape == tensor.shape
            assert torch.equal(place.flat().weight, weight)
            assert torch.equal(place.flat().scale, scale)
            count += 1
        else:
            assert torch.equal(place, tensor)
    assert count > 10


@pytest.mark.parametrize("quantization", ["auto", "none"])
@pytest.mark.parametrize("form", ["pack-quantized", "int-quantized"])
@pytest.mark.parametrize("group_size", [None, 32])
@pytest.mark.parametrize("name", ["nemotron_h", "granitemoehybrid", "granitemoehybrid with stacks", "qwen3"])
def test_compressed_checkpoints_are_read(
    name: str, group_size: int | None, form: str, quantization: str, tmp_path: Path
) -> None:
    """Routers, which do not stay quantised, among them; and experts and k alone, beside others in their matrix."""
    ignore = ("lm_head", ".*layers.1.*k_proj", ".*layers.5.*experts.2.down_proj")
    meaning = compressed(name.split()[0], tmp_path, group_size, form, ignore, with_stacks="with stacks" in name)
    spec = spec_of(tmp_path, quantization=quantization)
    model = build(spec)
    load_weights(model, tmp_path)
    loaded = values(model)
    for key, tensor in meaning.items():
        assert torch.equal(loaded[key.replace("backbone.", "model.")], tensor), key
    held = sum(weight.nbytes for weight in model.parameters())
    assert held == spec.weight_bytes("float32")
    assert any(weight.dtype is torch.int8 for weight in model.parameters()) == (quantization == "auto")


def test_one_error_lists_what_is_wrong_with_a_compressed_checkpoint(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    compressed("qwen3", tmp_path, None, "pack-quantized")
    tensors = load_file(tmp_path / SINGLE)
    layer = "model.layers.0.mlp"
    del tensors[f"{layer}.up_proj.weight_scale"]
    del tensors[f"{layer}.gate_proj.weight_packed"]
    tensors[f"{layer}.down_proj.weight_shape"] = torch.tensor([64, 95])
    tensors["lm_head.weight_scale"] = torch.ones(131, 1)
    tensors["model.norm.weight_scale"] = torch.ones(64, 1)
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(ModelError) as caught:
        load_weights(build(spec_of(tmp_path)), tmp_path)
    assert caught.value.message.splitlines()[1:] == [
        f"missing (2): {layer}.gate_proj.weight_packed, {layer}.up_proj.weight_scale.",
        "left over (2): lm_head.weight_scale, model.norm.weight_scale.",
        f"wrong shape (1): {layer}.down_proj.weight_shape is [64, 95], expected [64, 96].",
    ]


def test_random_weights_are_those_of_the_plain_model_to_half_a_scale() -> None:
    plain, quantised = (build(spec_of(checkpoint("bamba"), quantization=each)) for each in ("none", "int8_g128"))
    for model in (plain, quantised):
        randomize_weights(model, seed=3)
    expected = values(plain)
    for name, tensor in values(quantised).items():
        spread = expected[name].abs().max()
        assert ((tensor - expected[name]).abs() <= spread / 127).all(), name


# Running


def make_engine(directory: Path, **settings: Any) -> EngineCore:
    defaults = {"max_model_len": 160, "max_num_seqs": 4, "cache_memory": "16MiB", "threads": 1, "dtype": "float32"}
    return EngineCore(EngineConfig(model=str(directory), **(defaults | settings)))


PROMPTS = [random_prompt(60, seed=2), random_prompt(60, seed=2)[:48] + random_prompt(20, seed=3)]
PLAIN = {"graph_mode": "none", "enable_prefix_caching": False}


def tokens(directory: Path, **settings: Any) -> list[list[int]]:
    engine = make_engine(directory, **settings)
    return [list(complete(engine, prompt, greedy(max_tokens=24)).outputs[0].token_ids) for prompt in PROMPTS]


@needs_native
@pytest.mark.parametrize("group_size", [None, 32])
@pytest.mark.parametrize("name", ["nemotron_h", "nemotron_h_dense_head", "llama", "granitemoehybrid"])
def test_greedy_tokens_of_native_kernels_are_those_of_the_reference(
    name: str, group_size: int | None, tmp_path: Path
) -> None:
    compressed(name, tmp_path, group_size, "pack-quantized", ignore=(), with_stacks=True)
    expected = tokens(tmp_path, kernels="reference", **PLAIN)
    assert tokens(tmp_path, kernels="auto", **PLAIN) == expected
    assert tokens(tmp_path, kernels="reference", quantization="none", **PLAIN) == expected


@pytest.mark.parametrize("quantization", ["int8", "int8_g128"])
def test_cache_graphs_and_drafts_give_the_plain_tokens(quantization: str) -> None:
    directory = checkpoint("nemotron_h_dense_head")
    expected = tokens(directory, quantization=quantization, **PLAIN)
    for settings in (
        {"graph_mode": "full_and_piecewise", "strict": True, "check_replay": True},
        {"graph_mode": "none", "max_num_batched_tokens": 32},
        {"speculative": "mtp:2", "speculative_adaptive": "off", "strict": True},
    ):
        assert tokens(directory, quantization=quantization, **settings) == expected, settings


@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.parametrize("name", ["nemotron_h", "granitemoehybrid"])
def test_with_8_bit_experts_the_logits_are_nearly_those_of_the_weights_before(name: str, kernels: str) -> None:
    """Of a few tokens a router of random weights chooses another expert; so no bound on the largest difference."""
    engine = make_engine(checkpoint(name), quantization="int8", kernels=kernels)
    exact = EngineConfig(model=str(checkpoint(name)), dtype="float32", cache_memory="16MiB", threads=1)
    texts = [(random_prompt(40, seed), random_prompt(30, seed + 1)) for seed in (4, 6)]
    loss = compare_logits(engine, exact, texts)
    assert loss.positions == 60
    assert 0 < loss.mean_difference < 0.03
    assert 0 < loss.kl_divergence < 0.05
    assert loss.same_greedy > 0.9


@needs_native
@pytest.mark.parametrize("name", ["nemotron_h_dense_head", "llama", "granitemoehybrid"])
def test_with_8_bit_activations_native_kernels_compute_what_the_reference_does(name: str) -> None:
    """And not what they compute without."""
    engines = [make_engine(checkpoint(name), **SMALL, kernels=kernels) for kernels in ("auto", "reference")]
    plain = make_engine(checkpoint(name), quantization="int8")
    text = random_prompt(60, seed=8)
    small, defined, large = (host_values(text_logits(engine, text, (), 30)) for engine in (*engines, plain))
    largest = abs(defined).max()
    assert abs(small - defined).mean() < 2e-3 * largest
    assert 2 * abs(small - defined).mean() < abs(large - defined).mean() < 0.05 * largest


@needs_native
def test_with_8_bit_activations_cache_graphs_and_drafts_give_the_plain_tokens(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--reference-kernels"):
        pytest.skip("deterministic needs native kernels")
    directory = checkpoint("nemotron_h_dense_head")
    expected = tokens(directory, **SMALL, deterministic=True, **PLAIN)
    for settings in (
        {"graph_mode": "full_and_piecewise", "strict": True, "check_replay": True},
        {"graph_mode": "none", "max_num_batched_tokens": 32},
        {"speculative": "mtp:2", "speculative_adaptive": "off", "strict": True},
    ):
        assert tokens(directory, **SMALL, deterministic=True, **settings) == expected, settings


def test_a_checkpoint_with_8_bit_activations_loads_and_takes_them_if_asked(tmp_path: Path) -> None:
    compressed("llama", tmp_path, None, "int-quantized")
    given = json.loads((tmp_path / "config.json").read_text())
    given["quantization_config"]["config_groups"]["group_0"]["input_activations"] = DYNAMIC
    (tmp_path / "config.json").write_text(json.dumps(given))
    for asked in ("auto", "int8"):
        config = EngineConfig(model=str(tmp_path), activation_dtype=asked, kernels="reference")
        plan = make_plan(config, load_spec(config), cpu(8 * GIB))
        reasons = {decision.topic: decision.reason for decision in plan.decisions}
        assert ("activation_dtype int8 runs them so" in reasons["quantization"]) == (asked == "auto")
        assert ("activation_dtype" in reasons) == (asked == "int8")
        assert "as the checkpoint has them" in reasons["quantization"]
        model = build(load_spec(config))
        load_weights(model, tmp_path)
        asks = {module.int8_activations for module in model.modules() if isinstance(module, Linear)}
        assert asks == {asked == "int8"}
    assert "--compare-logits" in reasons["activation_dtype"]


@pytest.mark.parametrize(
    ("settings", "told", "remedies"),
    [
        ({}, "the model's dtype", [("quantization", "int8"), ("activation_dtype", "auto")]),
        ({"quantization": "int8_g128"}, "one scale per 128", [("quantization", "int8"), ("activation_dtype", "auto")]),
        ({"quantization": "int4"}, "int4_g128", [("quantization", "int8"), ("activation_dtype", "auto")]),
        (
            {"quantization": "int8", "tensor_parallel_size": 2}, "each would scale its own part",
            [("tensor_parallel_size", 1), ("activation_dtype", "auto")],
        ),
    ],
)  # fmt: skip
def test_8_bit_activations_are_refused_where_they_cannot_be(
    settings: dict[str, Any], told: str, remedies: list[tuple[str, object]]
) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        spec_of(checkpoint("llama"), activation_dtype="int8", **settings)
    assert [(remedy.setting, remedy.value) for remedy in caught.value.remedies] == remedies


def test_a_cpu_without_integer_products_of_bytes_refuses_8_bit_activations_by_name() -> None:
    config = EngineConfig(model=str(checkpoint("llama")), **SMALL)
    old = replace(cpu(8 * GIB), native=NativeFacts("x86_64_v3", "it is asked for"))
    with pytest.raises(ConfigError, match=r"x86_64_v3.*amx, avx512_vnni") as caught:
        make_plan(config, load_spec(config), old)
    assert [remedy.setting for remedy in caught.value.remedies] == ["activation_dtype"]
    newer = replace(old, native=NativeFacts("x86_64_v4_bf16", "it is asked for"))
    assert "gemm_s8_s8_vnni" in make_plan(config, load_spec(config), newer).kernels["linear"].ukernels
