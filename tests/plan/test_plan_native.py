"""Which native kernels are chosen: from plain sets of flags, and from made-up files."""

from __future__ import annotations

import re
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from ostinato.plan.device.instruction_sets import (
    CPU_FLAGS,
    NativeFacts,
    choose_isa,
    detect_native,
    installed_modules,
    read_cpu_flags,
)

X86 = CPU_FLAGS["x86_64"]
ALL = tuple(X86)
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("isa", ALL)
def test_a_cpu_gets_the_best_that_it_runs(isa: str) -> None:
    assert choose_isa(ALL, X86[isa], "x86_64") == NativeFacts(isa, f"{isa} is the best that this CPU runs")


@pytest.mark.parametrize("isa", ALL)
def test_one_missing_flag_is_enough_not_to_choose_an_instruction_set(isa: str) -> None:
    for flag in X86[isa]:
        assert choose_isa(ALL, X86[ALL[-1]] - {flag}, "x86_64").isa != isa


def test_without_a_module_for_the_cpu_a_lesser_one_is_chosen_and_the_better_is_named() -> None:
    facts = choose_isa(["x86_64_v3"], X86["x86_64_v4_bf16"], "x86_64")
    assert facts.isa == "x86_64_v3"
    assert "x86_64_v4_bf16" in facts.reason


def test_without_any_module_the_reason_says_how_to_get_one() -> None:
    facts = choose_isa([], X86["x86_64_v3"], "x86_64")
    assert facts.isa is None
    assert "compiler" in facts.reason
    assert "make native" in facts.reason


def test_modules_for_a_better_cpu_are_not_chosen_and_what_it_lacks_is_named() -> None:
    facts = choose_isa(["x86_64_v4"], X86["x86_64_v4"] - {"avx512f", "avx512vl"}, "x86_64")
    assert facts.isa is None
    assert "x86_64_v4, and this CPU lacks avx512f, avx512vl" in facts.reason


def test_on_a_cpu_that_is_too_old_no_compiler_is_recommended() -> None:
    facts = choose_isa([], X86["x86_64_v3"] - {"avx2"}, "x86_64")
    assert facts.isa is None
    assert "lacks avx2" in facts.reason
    assert "compiler" not in facts.reason


def test_every_64_bit_arm_cpu_runs_its_module() -> None:
    assert choose_isa(["aarch64"], [], "aarch64").isa == "aarch64"


def test_an_unknown_architecture_is_named_beside_the_known_ones() -> None:
    facts = choose_isa(ALL, [], "riscv64")
    assert facts.isa is None
    assert "x86_64 and aarch64" in facts.reason
    assert "riscv64" in facts.reason


def test_modules_count_only_if_this_interpreter_can_load_them(tmp_path: Path) -> None:
    for name in (f"_native_x86_64_v3{EXTENSION_SUFFIXES[0]}", "_native_x86_64_v4.cpython-39-x86_64-linux-gnu.so"):
        (tmp_path / name).touch()
    assert installed_modules(tmp_path) == {"x86_64_v3"}


def test_a_cpu_without_a_list_of_flags_has_none(tmp_path: Path) -> None:
    assert read_cpu_flags(tmp_path) == frozenset()
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nFeatures\t: fp asimd\n")
    assert read_cpu_flags(tmp_path) == frozenset()


def test_a_cpu_has_the_flags_that_it_lists(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(
        "processor\t: 0\nflags\t\t: avx avx2\n\nprocessor\t: 1\nflags\t\t: avx fma\n"
    )
    assert read_cpu_flags(tmp_path) == {"avx", "avx2"}


def test_what_is_chosen_for_this_machine_is_installed() -> None:
    facts = detect_native()
    assert facts.isa is None or facts.isa in installed_modules()


def test_the_build_knows_the_same_instruction_sets_in_the_same_order() -> None:
    text = (ROOT / "cmake/instruction_sets.cmake").read_text()
    assert {m: tuple(isas) for m, isas in CPU_FLAGS.items()} == {
        machine: tuple(re.search(rf"set\(isas_of_{machine} (.*)\)", text)[1].split()) for machine in CPU_FLAGS
    }
