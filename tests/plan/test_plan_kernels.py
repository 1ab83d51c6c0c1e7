"""Which implementation of each operation the plan chooses, and what it says where it cannot."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from ostinato.config import EngineConfig
from ostinato.errors import ConfigError
from ostinato.models.checkpoint import load_spec, model_spec
from ostinato.ops.launch_tables.pointwise import clip_launches
from ostinato.ops.operations import OPERATIONS, call_with_known
from ostinato.ops.scratch import native_encoder_attention, reference_gather_act_order
from ostinato.ops.ukernels import ROWS, Problem, candidates, select
from ostinato.plan.device.gpu_catalogue import CATALOGUE, DeviceSpec
from ostinato.plan.device.kernel_support import NativeFacts, TritonFacts, features
from ostinato.plan.kernels import choose_kernels
from ostinato.plan.plan import make_plan
from ostinato.plan.quantization import AnyQuantization, BlockQuantization, Quantization
from ostinato.plan.ukernels import products_of
from tests.support.checkpoints import RECIPES, recipe
from tests.support.plan_cases import hybrid
from tests.support.vl_models import vl_spec

CPU = DeviceSpec("cpu", "cpu", 2**34, 2, None, None, "a test", NativeFacts("x86_64_v3", "it is the best"))
BARE = replace(CPU, native=NativeFacts(None, "no native kernels are installed: install a compiler"))


def test_every_operation_with_a_native_kernel_uses_it() -> None:
    choices = choose_kernels(hybrid(), CPU)
    chosen = {op for op, choice in choices.items() if choice.implementation == "native"}
    assert chosen == {op for op in choices if OPERATIONS[op].native is not None}


def test_without_an_extension_the_reference_runs_and_the_reason_says_what_is_missing() -> None:
    choices = choose_kernels(hybrid(), BARE)
    assert {choice.implementation for choice in choices.values()} == {"reference"}
    assert all("install a compiler" in choice.reason for choice in choices.values())


def test_reference_can_be_asked_for() -> None:
    choices = choose_kernels(hybrid(), CPU, "reference")
    assert {choice.implementation for choice in choices.values()} == {"reference"}


def test_native_kernels_that_are_asked_for_and_absent_are_an_error_that_names_the_alternatives() -> None:
    with pytest.raises(ConfigError, match="install a compiler") as caught:
        choose_kernels(hybrid(), BARE, "native")
    assert {remedy.value for remedy in caught.value.remedies} == {"auto", "reference"}


SCANS = replace(hybrid(), ops=("linear", "rms_norm", "ssd_scan"))


def on_module(isa: str) -> DeviceSpec:
    return replace(CPU, native=NativeFacts(isa, "it is the best"))


def test_the_plan_names_the_micro_kernels_that_a_model_may_take() -> None:
    choices = choose_kernels(SCANS, on_module("x86_64_v4_amx"), dtype="bfloat16")
    assert choices["linear"].ukernels == ("gemm_bf16_any_amx", "gemv_bf16_any_avx512bf16")
    assert choices["linear"].reason == "it is the best; by gemm_bf16_any_amx, gemv_bf16_any_avx512bf16"
    assert choices["ssd_scan"].ukernels == ("ssd_scan_bf16_amx",)
    assert (choices["rms_norm"].ukernels, choices["rms_norm"].reason) == ((), "it is the best")
    fixed = choose_kernels(SCANS, on_module("x86_64_v4_amx"), deterministic=True, dtype="bfloat16")
    assert fixed["linear"].reason == "it is the best; in a fixed order by gemv_bf16_any_avx512bf16"
    floats = choose_kernels(SCANS, on_module("x86_64_v4_amx"), dtype="float32")
    assert floats["linear"].ukernels == ("gemm_f32_plain_avx512", "gemv_f32_any_avx512")
    assert choose_kernels(hybrid(), BARE)["linear"].ukernels == ()


@pytest.mark.parametrize(
    ("isa", "dtype", "quantization", "rows"),
    [
        ("x86_64_v3", "bfloat16", Quantization(), ("gemv_i16_s8_avx2", "gemm_i16_s8_avx2", "gemv_f32_any_avx2")),
        ("x86_64_v3", "float32", Quantization(), ("gemm_f32_any_avx2", "gemv_f32_any_avx2")),
        ("x86_64_v4", "bfloat16", Quantization(64), ("gemm_f32_s8_avx512", "gemv_f32_any_avx512")),
        (
            "x86_64_v4_bf16",
            "bfloat16",
            BlockQuantization(format="int4_g32"),
            (
                "gemv_i16_block_vnni",
                "gemm_bf16_dequant_avx512bf16",
                "gemm_bf16_block_avx512bf16",
                "gemv_bf16_rounded_avx512bf16",
            ),
        ),
        (
            "aarch64_i8mm_bf16",
            "bfloat16",
            Quantization(),
            ("gemv_i16_s8_smmla", "gemm_bf16_any_bfmmla", "gemv_bf16_any_bfdot"),
        ),
        (
            "aarch64_dotprod",
            "bfloat16",
            BlockQuantization(format="int4_g32"),
            ("gemv_i16_any_sdot", "gemm_f32_block_generic", "gemv_f32_dequant_generic"),
        ),
        (
            "aarch64",
            "bfloat16",
            BlockQuantization(format="int4_g32"),
            ("gemm_f32_block_generic", "gemv_f32_dequant_generic", "gemv_f32_any_generic"),
        ),
    ],
)
def test_types_of_tokens_and_weights_decide_which_rows_a_product_may_take(
    isa: str, dtype: str, quantization: AnyQuantization, rows: tuple[str, ...]
) -> None:
    model = replace(load_spec(EngineConfig(model="demo")), quantization=quantization)
    products = [each for each in products_of(model) if each.op == "linear" and each.weights != ("same",)]
    products = [each for each in products if each.k >= 512]  # shorter rows have a kernel of their own
    assert products
    for product in products:
        problem = Problem("linear", dtype, product.weights, product.k)
        assert tuple(dict.fromkeys(row.name for row in candidates(problem, features(isa)))) == rows


def test_vnni_adds_tokens_in_8_bits_and_8_bit_rows_in_integers_to_the_rows_of_avx_512() -> None:
    plain, vnni = ({row.name for row in ROWS if row.runs_on(features(f"x86_64_v4{of}"))} for of in ("", "_vnni"))
    in_integers = {"gemv_i16_s8_vnni", "gemm_i16_s8_vnni", "gemm_i16_block_vnni"}
    assert vnni == plain | {"gemm_s8_s8_vnni"} | in_integers
    assert not plain & {"gemm_s8_s8_vnni", "gemv_i16_s8_vnni"}


def test_each_matrix_has_the_kind_that_its_file_or_an_exception_gives_it_under_its_full_name() -> None:
    model = load_spec(EngineConfig(model="demo"))
    first, *others = model.linears
    formats = dict.fromkeys(first.names, "Q8_0") | {name: "Q5_0" for weight in others for name in weight.names}
    in_blocks = replace(model, quantization=BlockQuantization(tuple(formats.items())))
    assert {each.weights for each in products_of(in_blocks) if each.op == "linear"} == {("Q8_0",), ("Q5_0",)}
    excepted = Quantization(ignore=tuple(name.removesuffix(".weight") for name in first.names))
    kinds = {each.weights for each in products_of(replace(model, quantization=excepted)) if each.op == "linear"}
    assert kinds == {("same",), ("s8_row",)}


@pytest.mark.parametrize("name", ["zamba2", "hrm_text"])
def test_a_matrix_that_several_layers_use_has_the_kind_of_its_owner(name: str) -> None:
    model = model_spec(recipe(name).to_dict())
    formats = tuple((name, "Q8_0") for weight in model.linears for name in weight.names)
    products = products_of(replace(model, quantization=BlockQuantization(formats)))
    assert any(layer.shared_weights for layer in model.layers)
    assert {each.weights for each in products if each.op == "linear"} == {("Q8_0",)}


def test_a_choice_says_why_each_row_before_it_declines() -> None:
    problem = Problem("linear", "bfloat16", ("Q4_K",), 512)
    choice = select(problem, features("x86_64_v4_bf16"), lambda _: 4)
    assert choice.row.name == "gemv_bf16_rounded_avx512bf16"
    reasons = {(row.name, row.max_m): reason for row, reason in choice.declined}
    assert reasons["gemm_bf16_any_amx", None] == "this CPU's kernels lack amx"
    assert reasons["gemv_i16_block_vnni", 8] == "tokens are bfloat16"
    in_integers = {reason for row, reason in choice.declined if row.max_m == 2 and "Q4_K" in row.rhs}
    assert in_integers == {"it takes 1 to 2 tokens, not 4"}
    assert reasons["gemm_bf16_plain_avx512bf16", None] == "weights are Q4_K"
    fixed = select(replace(problem, fixed_order=True), features("x86_64_v4_bf16"), lambda _: 4)
    assert fixed.row.name == "gemv_bf16_any_avx512bf16"
    assert {row.name: reason for row, reason in fixed.declined}["gemv_bf16_rounded_avx512bf16"] == (
        "its order of sums depends on m"
    )


def test_names_of_rows_are_of_one_operation_and_fallbacks_exist() -> None:
    names = {row.name: row.op for row in ROWS}
    assert all(row.op == names[row.name] for row in ROWS)
    assert all(row.fallback in names for row in ROWS if row.fallback is not None)


GPU = CATALOGUE["h100-80gb"]


def test_on_a_gpu_every_operation_with_a_triton_kernel_uses_it_and_the_others_say_that_there_is_none() -> None:
    choices = choose_kernels(replace(hybrid(), ops=("rms_norm", "rotate")), GPU)
    for op, choice in choices.items():
        there = OPERATIONS[op].triton is not None
        assert choice.implementation == ("triton" if there else "reference")
        assert choice.reason == ("torch for CUDA brings Triton" if there else "there is no Triton kernel for it")
    assert choices["rms_norm"].implementation == "triton"
    assert {each.implementation for each in choose_kernels(hybrid(), GPU, "reference").values()} == {"reference"}


def test_without_triton_a_gpu_runs_references_and_the_reason_says_what_is_missing() -> None:
    bare = replace(GPU, triton=TritonFacts(False, "Triton is not installed: pip install triton"))
    assert {choice.implementation for choice in choose_kernels(hybrid(), bare).values()} == {"reference"}
    with pytest.raises(ConfigError, match="pip install triton") as caught:
        choose_kernels(hybrid(), bare, "triton")
    assert {remedy.value for remedy in caught.value.remedies} == {"auto", "reference"}


def test_triton_kernels_that_are_asked_for_on_a_cpu_are_an_error() -> None:
    with pytest.raises(ConfigError, match="Triton kernels are for NVIDIA GPUs"):
        choose_kernels(hybrid(), CPU, "triton")


def test_every_size_that_a_rule_of_an_operation_asks_for_is_one_that_the_plan_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: dict[Callable[..., object], set[str]] = {}

    def noted(rule: Callable[..., object], sizes: Mapping[str, object]) -> object:
        given.setdefault(rule, set()).update(sizes)
        return call_with_known(rule, sizes)

    for module in ("launches", "kernel_costs", "memory.kernel_scratch"):
        monkeypatch.setattr(f"ostinato.plan.{module}.call_with_known", noted)
    every = [model_spec(recipe(name).to_dict()) for name in RECIPES] + [vl_spec("qwen3_vl")]
    specs = [*{spec.ops: spec for spec in every}.values()]
    for spec in specs:
        for device in (CPU, BARE, CATALOGUE["h100-80gb"]):
            make_plan(EngineConfig(), spec, device)
    make_plan(EngineConfig(quantization="int8"), specs[0], BARE)
    for name, row in OPERATIONS.items():
        of_kernels = [kernel for kernel in (row.reference, row.native, row.triton) if kernel is not None]
        rules = [rule for kernel in of_kernels for rule in (kernel.scratch, kernel.launches)]
        for rule in (*rules, row.work):
            # Only ranks gather inputs in the order of their activations; the encoder's memory is asked for directly.
            # Only encoders clip.
            if rule not in (None, reference_gather_act_order, native_encoder_attention, clip_launches):
                assert inspect.signature(rule).parameters.keys() <= given.get(rule, set()), (name, rule)
