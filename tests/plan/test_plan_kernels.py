"""Which implementation of each operation the plan chooses, and what it says where it cannot."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ostinato.errors import ConfigError
from ostinato.ops.operations import OPERATIONS
from ostinato.plan.device.gpu_catalogue import CATALOGUE, DeviceSpec
from ostinato.plan.device.kernel_support import NativeFacts, TritonFacts
from ostinato.plan.kernels import choose_kernels
from tests.support.plan_cases import hybrid

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


def test_the_plan_says_what_runs_on_matrix_units() -> None:
    with_units = replace(CPU, native=NativeFacts("x86_64_v4_amx", "it is the best", "granted"))
    reasons = {op: choice.reason for op, choice in choose_kernels(hybrid(), with_units).items()}
    facts = OPERATIONS["linear"].native
    units = f"it is the best; on matrix units: {facts.matrix_units}"
    assert reasons["linear"] == f"{units}; in 16-bit integers: {facts.few_in_integers}"
    assert reasons["rms_norm"] == "it is the best"
    in_order = choose_kernels(hybrid(), with_units, deterministic=True)["linear"].reason
    without_either = "in a fixed order, without matrix units and 16-bit integers"
    assert in_order == f"it is the best; {without_either}"
    without = choose_kernels(hybrid(), replace(CPU, native=NativeFacts("x86_64_v4", "it is the best")))
    assert without["linear"].reason == f"it is the best; in 16-bit integers: {facts.few_in_integers}"


@pytest.mark.parametrize("isa", ["x86_64_v3", "x86_64_v4", "x86_64_v4_bf16"])
def test_the_plan_says_what_is_multiplied_in_integers(isa: str) -> None:
    device = replace(CPU, native=NativeFacts(isa, "it is the best"))
    facts = OPERATIONS["linear"].native
    what = facts.in_integers if isa == "x86_64_v3" else facts.few_in_integers
    reasons = {op: choice.reason for op, choice in choose_kernels(hybrid(), device).items()}
    assert reasons["linear"] == f"it is the best; in 16-bit integers: {what}"
    assert reasons["rms_norm"] == "it is the best"
    in_order = choose_kernels(hybrid(), device, deterministic=True)["linear"].reason
    assert in_order == "it is the best; in a fixed order, without 16-bit integers"


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
