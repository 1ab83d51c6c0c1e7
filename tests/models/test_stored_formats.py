"""Checkpoints of 4-bit and float8 weights: what is loaded of each format, and what is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ostinato import EngineConfig, ModelError
from ostinato.formats.mapped_files import SINGLE
from ostinato.layers.allocation import BlockView, QuantizedView, WeightAllocator, checkpoint_views
from ostinato.models.base import CausalLM
from ostinato.models.checkpoint import load_spec, model_spec
from ostinato.models.loader import build_model, load_weights
from ostinato.models.random_weights import randomize_weights
from ostinato.ops.arrays import TorchArrays, dtype_name
from ostinato.ops.dispatch import select_ops
from ostinato.ops.quant.block_formats import BLOCK_FORMATS
from ostinato.plan.device.gpu_catalogue import CATALOGUE
from ostinato.plan.plan import Plan, make_plan
from tests.models.test_checkpoint_specs import LLAMA
from tests.models.test_quantization import PLAIN, tokens, values
from tests.support.allocations import peak_with_numpy
from tests.support.checkpoints import checkpoint
from tests.support.loading import load_model, load_with
from tests.support.native_sets import runnable_sets
from tests.support.plan_cases import GIB, cpu
from tests.support.quantized_checkpoints import compressed
from tests.support.stored_formats import EXPANDED, FLOAT8, FORMS, IN_ORDER, stored

UP = "model.layers.0.mlp.up_proj"
DOWN = "model.layers.0.mlp.down_proj"


def loaded(directory: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> CausalLM:
    return load_with(directory, dtype_name(dtype), **settings)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["llama", "nemotron_h"])
def test_expanded_weights_are_those_that_the_checkpoint_stands_for(name: str, form: str, tmp_path: Path) -> None:
    meaning = stored(name, tmp_path, form)
    model = loaded(tmp_path, quantization="none")
    places = dict(checkpoint_views(model))
    assert {model.checkpoint_name(key) for key in meaning} - {None} == set(places)
    for key, expected in meaning.items():
        place = model.checkpoint_name(key)
        if place is not None:
            assert torch.equal(places[place], expected), key


@pytest.mark.parametrize("form", EXPANDED)
def test_the_plan_tells_what_expanding_costs(form: str, tmp_path: Path) -> None:
    stored("llama", tmp_path, form)
    config = EngineConfig(model=str(tmp_path), dtype="bfloat16")
    plan = make_plan(config, load_spec(config), cpu(8 * GIB))
    [decision] = [decision for decision in plan.decisions if decision.topic == "quantization"]
    assert (decision.requested, decision.effective) == ("auto", "none")
    assert "become bfloat16 while loading, since " in decision.reason
    assert "KiB instead of about " in decision.reason
    assert "activations stay in bfloat16" in decision.reason


@pytest.mark.parametrize("form", EXPANDED)
def test_expanding_holds_one_matrix_beside_the_weights_that_the_plan_counts(form: str, tmp_path: Path) -> None:
    meaning = stored("llama", tmp_path, form)
    config = EngineConfig(model=str(tmp_path), dtype="bfloat16")
    spec = load_spec(config)
    model = build_model(WeightAllocator(select_ops({}), TorchArrays("cpu"), "bfloat16"), spec)
    held = sum(each.nbytes for each in model.parameters())
    assert make_plan(config, spec, cpu(8 * GIB)).memory.weights == held
    largest = max(tensor.numel() for tensor in meaning.values())
    # Some forms of a piece at once: integers, zero points and scales per element, their difference, the product.
    # Python keeps names and headers besides.
    assert peak_with_numpy(lambda: load_weights(model, tmp_path)) - 2**17 < 4 * 6 * largest < held
    assert sum(each.nbytes for each in model.parameters()) == held


@pytest.mark.parametrize("form", ["fp8-narrow", "fp8-blocks"])
def test_float8_may_be_quantised_anew(form: str, tmp_path: Path) -> None:
    stored("llama", tmp_path, form)
    config = EngineConfig(model=str(tmp_path), quantization="int8")
    plan = make_plan(config, load_spec(config), cpu(8 * GIB))
    [decision] = [decision for decision in plan.decisions if decision.topic == "quantization"]
    assert decision.effective == "int8"
    assert decision.reason.startswith("made while loading, of the checkpoint's ")
    place = dict(checkpoint_views(loaded(tmp_path, quantization="int8")))[f"{UP}.weight"]
    assert isinstance(place, QuantizedView)


@pytest.mark.parametrize("form", ["gptq", "awq", "fp8-blocks", "ct-zeros"])
def test_modules_that_a_config_leaves_out_stay_as_they_are(form: str, tmp_path: Path) -> None:
    meaning = stored("qwen3", tmp_path, form, ignore=(r"layers\.1\..*k_proj", "down_proj"))
    assert meaning["model.layers.1.self_attn.k_proj.weight"].dtype == torch.float32
    model = loaded(tmp_path, quantization="none")
    places = dict(checkpoint_views(model))
    assert all(torch.equal(places[key], expected) for key, expected in meaning.items() if key in places)
    spec = model.spec
    assert spec.stored_quantization is not None
    covered = {name for weight in spec.table if spec.stored_quantization.covers(weight) for name in weight.names}
    assert f"{UP}.weight" in covered
    assert not any("down_proj" in name or name.startswith("model.layers.1.self_attn.k") for name in covered)


def test_weights_in_several_files_are_found(tmp_path: Path) -> None:
    meaning = stored("llama", tmp_path, "gptq")
    tensors = load_file(tmp_path / SINGLE)
    halves = ({key: tensors[key] for key in tensors if ("scales" in key) == side} for side in (False, True))
    for i, half in enumerate(halves):
        save_file(half, tmp_path / f"part{i}.safetensors")
    weight_map = {key: f"part{int('scales' in key)}.safetensors" for key in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / SINGLE).unlink()
    places = dict(checkpoint_views(loaded(tmp_path, quantization="none")))
    assert torch.equal(places[f"{UP}.weight"], meaning[f"{UP}.weight"])


# What is refused


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"bits": 3}, "bits = 3"),
        ({"bits": 8}, "bits = 8"),
        ({"group_size": 16}, "group_size = 16"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
        ({"is_marlin_format": True}, "is_marlin_format"),
        ({"dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic"),
        ({"modules_in_block_to_quantize": [["mlp.up_proj"]]}, "modules_in_block_to_quantize"),
        ({"lm_head": True}, "lm_head = True"),
        ({"pack_dtype": "int64"}, "pack_dtype"),
        ({"modules_to_not_convert": ["("]}, "no pattern"),
        ({"quant_method": "awq", "version": "gemv"}, "version = 'gemv'"),
        ({"quant_method": "awq", "zero_point": False}, "zero_point = False"),
        ({"quant_method": "awq", "modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "activation_scheme = 'static'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt = 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "bitsandbytes"}, "compressed-tensors, gptq, awq, fp8"),
        ({"quant_method": None}, "an unnamed method"),
    ],
)
def test_other_values_are_refused_with_those_that_work(changes: dict[str, Any], told: str) -> None:
    given = FORMS["gptq"][0] | changes
    with pytest.raises(ModelError, match=told.replace("(", r"\(")) as caught:
        model_spec({**LLAMA, "quantization_config": given})
    assert "supported" in caught.value.message or "pattern" in caught.value.message


def test_a_pattern_for_a_module_means_the_whole_of_its_name() -> None:
    given = FORMS["awq"][0] | {"modules_to_not_convert": ["mlp.gate", "visual", "layers.1", "model.layers.2"]}
    spec = model_spec({**LLAMA, "quantization_config": given})
    quantised = spec.stored_quantization
    assert quantised is not None
    layers = [weight for weight in spec.linears if not weight.is_lm_head]
    kept = {weight.names[0].split(".")[2] for weight in layers if not quantised.covers(weight)}
    covered = {weight.names[0].split(".")[2] for weight in layers if quantised.covers(weight)}
    assert kept & {"1", "2"} == kept
    assert covered == {"0"}


@pytest.mark.parametrize(
    ("form", "tensor", "told"),
    [
        ("gptq", "qweight", f"missing (1): {UP}.qweight."),
        ("gptq", "scales", f"missing (1): {UP}.scales."),
        ("gptq-act-order", "g_idx", f"missing (1): {UP}.g_idx."),
        ("awq", "qzeros", f"missing (1): {UP}.qzeros."),
        ("ct-zeros", "weight_zero_point", f"missing (1): {UP}.weight_zero_point."),
        ("fp8-blocks", "weight_scale_inv", f"missing (1): {UP}.weight_scale_inv."),
        ("fp8-blocks", "weight", f"missing (1): {UP}.weight."),
    ],
)
def test_a_part_that_is_missing_is_named(form: str, tensor: str, told: str, tmp_path: Path) -> None:
    stored("llama", tmp_path, form)
    tensors = load_file(tmp_path / SINGLE)
    del tensors[f"{UP}.{tensor}"]
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(ModelError) as caught:
        loaded(tmp_path)
    assert caught.value.message.splitlines()[1:] == [told]


def test_parts_of_another_shape_or_type_are_named(tmp_path: Path) -> None:
    stored("llama", tmp_path, "gptq")
    tensors = load_file(tmp_path / SINGLE)
    tensors[f"{UP}.qzeros"] = tensors[f"{UP}.qzeros"][:1].contiguous()
    tensors[f"{UP}.qweight"] = tensors[f"{UP}.qweight"].long()
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(ModelError) as caught:
        loaded(tmp_path)
    assert caught.value.message.splitlines()[1:] == [
        f"wrong shape (1): {UP}.qzeros is [1, 12], expected [2, 12].",
        f"wrong type (1): {UP}.qweight is I64, expected I32.",
    ]


def test_an_order_of_groups_that_the_config_does_not_tell_of_is_refused(tmp_path: Path) -> None:
    stored("llama", tmp_path, "gptq-act-order")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["desc_act"] = False
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="desc_act"):
        loaded(tmp_path)


@pytest.mark.parametrize("index", [-1, 2])
def test_groups_that_there_are_no_scales_of_are_refused(index: int, tmp_path: Path) -> None:
    stored("llama", tmp_path, "gptq-act-order")
    tensors = load_file(tmp_path / SINGLE)
    tensors[f"{UP}.g_idx"][3] = index
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(ModelError, match="it has scales for 2"):
        loaded(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.float8_e4m3fn, torch.int32])
def test_a_plain_weight_of_another_type_is_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = load_file(checkpoint("llama") / SINGLE)
    tensors[f"{UP}.weight"] = tensors[f"{UP}.weight"].to(dtype)
    save_file(tensors, tmp_path / SINGLE)
    (tmp_path / "config.json").write_text((checkpoint("llama") / "config.json").read_text())
    with pytest.raises(ModelError, match=rf"wrong type \(1\): {UP}.weight is \w+, expected F32, F16 or BF16"):
        loaded(tmp_path)


def test_a_weight_that_should_be_quantised_and_is_not_is_refused(tmp_path: Path) -> None:
    """It would have to be quantised here, and nothing would tell of it."""
    compressed("llama", tmp_path, None, "pack-quantized")
    tensors = load_file(tmp_path / SINGLE)
    for part in ("packed", "scale", "shape"):
        del tensors[f"{UP}.weight_{part}"]
    tensors[f"{UP}.weight"] = torch.randn(96, 64)
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(ModelError) as caught:
        loaded(tmp_path)
    [told] = caught.value.message.splitlines()[1:]
    assert told.startswith("not quantised, and not among the modules that its quantization_config leaves out (1): ")
    assert told.endswith(f"{UP}.weight.")
    assert torch.equal(
        dict(checkpoint_views(loaded(tmp_path, quantization="none")))[f"{UP}.weight"], tensors[f"{UP}.weight"]
    )


# Running


KEPT = [form for form in FORMS if form not in EXPANDED]


@pytest.mark.parametrize(
    ("form", "in_blocks"),
    [(form, True) for form in KEPT] + [(form, False) for form in KEPT if form not in (*FLOAT8, *IN_ORDER)],
)
def test_weights_are_kept_exactly(form: str, in_blocks: bool, tmp_path: Path) -> None:
    """In blocks where kernels read them, as the reference does, and else 4 bits as 8-bit integers of the same value."""
    meaning = stored("nemotron_h", tmp_path, form)
    spec = load_spec(EngineConfig(model=str(tmp_path), kernels="reference"))
    if not in_blocks:
        assert spec.stored_quantization is not None
        spec = replace(spec, quantization=spec.stored_quantization.quantization(read=()))
    model = load_model(spec, tmp_path)
    found, places = values(model), dict(checkpoint_views(model))
    count = 0
    for key, expected in meaning.items():
        place = model.checkpoint_name(key)
        if place is not None:
            assert torch.equal(found[place], expected), key
            count += isinstance(places[place], BlockView if in_blocks else QuantizedView)
    assert count > 8
    assert sum(weight.nbytes for weight in model.parameters()) == spec.weight_bytes("float32")


@pytest.mark.parametrize("form", ["fp8-blocks", "gptq-act-order"])
def test_random_weights_are_made_in_the_same_blocks(form: str, tmp_path: Path) -> None:
    stored("llama", tmp_path, form)
    spec = load_spec(EngineConfig(model=str(tmp_path), kernels="reference", random_weights=True))
    model = build_model(WeightAllocator(select_ops({}), TorchArrays("cpu"), "float32"), spec)
    randomize_weights(model, 0)
    places = dict(checkpoint_views(model))
    found, place = values(model)[f"{UP}.weight"], places[f"{UP}.weight"]
    assert isinstance(place, BlockView)
    # Variance 1 / inputs, in few bits.
    assert found.std().item() == pytest.approx(place.in_size**-0.5, rel=0.1)
    if form == "gptq-act-order":
        assert place.order is not None
        assert place.order.sort().values.tolist() == list(range(place.in_size))


def test_scales_of_32_bits_do_not_fit_into_blocks_and_the_error_says_what_does(tmp_path: Path) -> None:
    stored("llama", tmp_path, "ct")
    tensors = load_file(tmp_path / SINGLE)
    tensors[f"{UP}.weight_scale"] = torch.rand(96, 2)
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(ModelError, match=f"scales of {UP}.weight are in float32") as caught:
        loaded(tmp_path, kernels="reference")
    assert [(each.setting, each.value) for each in caught.value.remedies] == [("quantization", "none")]
    loaded(tmp_path, quantization="none")


def on_a_gpu(directory: Path, **settings: Any) -> Plan:
    config = EngineConfig(model=str(directory), dtype="bfloat16", **settings)
    return make_plan(config, load_spec(config), CATALOGUE["h100-80gb"])


@pytest.mark.parametrize("form", FLOAT8)
def test_where_no_kernel_reads_blocks_they_are_expanded_and_the_plan_says_why(form: str, tmp_path: Path) -> None:
    stored("llama", tmp_path, form)
    [decision] = [each for each in on_a_gpu(tmp_path).decisions if each.topic == "quantization"]
    assert decision.effective == "none"
    assert re.search("since no kernel here reads float8 weights", decision.reason)


@pytest.mark.parametrize("form", [form for form in FORMS if form not in (*FLOAT8, *EXPANDED)])
def test_4_bit_checkpoints_run_in_their_blocks_on_a_gpu_and_the_plan_counts_them_so(form: str, tmp_path: Path) -> None:
    stored("llama", tmp_path, form)
    plan = on_a_gpu(tmp_path)
    [decision] = [each for each in plan.decisions if each.topic == "quantization"]
    assert decision.effective in BLOCK_FORMATS
    assert decision.reason.startswith("as the checkpoint has them; ")
    assert plan.memory.weights < on_a_gpu(tmp_path, quantization="none").memory.weights
    launches = {op: plan.kernels[op].launches for op in ("linear", "embedding")}
    assert {plan.kernels[op].implementation for op in launches} == {"triton"}
    inputs = {launch.blocks["INPUTS"] for launch in launches["linear"] if launch.kernel == "quantized_product"}
    assert max(inputs) <= int(decision.effective.removeprefix("int4_g"))


@pytest.mark.parametrize("form", ["fp8-blocks", "ct-float-channel", "gptq-act-order"])
def test_the_plan_says_how_they_run(form: str, tmp_path: Path) -> None:
    stored("llama", tmp_path, form)
    config = EngineConfig(model=str(tmp_path), dtype="bfloat16", kernels="reference")
    plan = make_plan(config, load_spec(config), cpu(8 * GIB))
    [decision] = [decision for decision in plan.decisions if decision.topic == "quantization"]
    in_order, names = form in IN_ORDER, {"fp8-blocks": "fp8_g32", "ct-float-channel": "fp8_g128"}
    assert decision.effective == names.get(form, "int4_g32")
    assert decision.reason.startswith("as the checkpoint has them; ")
    assert ("the elements of a row are sorted by their groups (act-order)" in decision.reason) == in_order
    assert ("activations stay in bfloat16" in decision.reason) != in_order


def test_a_nan_among_float8_weights_is_one_of_its_block(tmp_path: Path) -> None:
    stored("llama", tmp_path, "fp8-blocks")
    tensors = load_file(tmp_path / SINGLE)
    tensors[f"{UP}.weight"].view(torch.uint8)[3, 40] = 0xFF
    save_file(tensors, tmp_path / SINGLE)
    found = values(loaded(tmp_path, kernels="reference"))[f"{UP}.weight"].isnan()
    assert found[3].tolist() == [False] * 32 + [True] * 32
    assert found.sum() == 32


def test_one_product_has_one_order_of_its_inputs(tmp_path: Path) -> None:
    stored("llama", tmp_path, "gptq-act-order")
    tensors = load_file(tmp_path / SINGLE)
    tensors[f"{UP}.g_idx"] = tensors[f"{UP}.g_idx"].flip(0)
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(ModelError, match="whose other parts have their groups in another order") as caught:
        loaded(tmp_path, kernels="reference")
    assert [(each.setting, each.value) for each in caught.value.remedies] == [("quantization", "none")]
    loaded(tmp_path, quantization="none")


def test_groups_of_other_sizes_than_the_config_says_are_refused(tmp_path: Path) -> None:
    stored("llama", tmp_path, "gptq-act-order")
    tensors = load_file(tmp_path / SINGLE)
    index = tensors[f"{DOWN}.g_idx"]
    index[index == 1] = 0
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(ModelError, match=f"groups of {DOWN}.weight have other numbers of elements than 32") as caught:
        loaded(tmp_path, kernels="reference")
    assert [(each.setting, each.value) for each in caught.value.remedies] == [("quantization", "none")]


@pytest.mark.parametrize("form", ["gptq-zeros", "ct-channel-zeros", "gptq-act-order", "fp8-blocks", "ct-float-channel"])
@pytest.mark.parametrize("name", ["nemotron_h_dense_head", "qwen3"])
def test_checkpoints_give_the_tokens_of_their_expanded_weights(name: str, form: str, tmp_path: Path) -> None:
    stored(name, tmp_path, form)
    expected = tokens(tmp_path, kernels="reference", quantization="none", **PLAIN)
    assert tokens(tmp_path, kernels="reference", **PLAIN) == expected
    assert tokens(tmp_path, **PLAIN) == expected
    for settings in (
        {"graph_mode": "full_and_piecewise", "strict": True, "check_replay": True},
        {"max_num_batched_tokens": 32},
        {"speculative": "ngram:2", "speculative_adaptive": "off"},
        *([{"deterministic": True, "graph_mode": "none"}] if runnable_sets() else []),
    ):
        assert tokens(tmp_path, **settings) == expected
