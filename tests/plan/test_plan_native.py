"""Which native kernels are chosen: from plain sets of flags, and from made-up files."""

from __future__ import annotations

import struct
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from ostinato.os_support import request_matrix_units
from ostinato.plan.device.isa_table import MATRIX_UNITS, TABLE
from ostinato.plan.device.kernel_support import (
    CPU_FLAGS,
    GRANTED,
    HOW_TO_GET,
    TEST_ISAS,
    NativeFacts,
    ask_for_matrix_units,
    choose_isa,
    detect_native,
    installed_modules,
    runnable_here,
)
from ostinato.plan.device.linux import read_cpu_flags

X86 = CPU_FLAGS["x86_64"]
ALL = tuple(X86)
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("isa", ALL)
def test_a_cpu_gets_the_best_that_it_runs(isa: str) -> None:
    facts = choose_isa(ALL, X86[isa], "x86_64", GRANTED)
    assert facts == NativeFacts(isa, f"{isa} is the best that this CPU runs", GRANTED)


@pytest.mark.parametrize("isa", ALL)
def test_one_missing_flag_is_enough_not_to_choose_an_instruction_set(isa: str) -> None:
    for flag in X86[isa]:
        assert choose_isa(ALL, X86[ALL[-1]] - {flag}, "x86_64", GRANTED).isa != isa


def test_a_cpu_that_multiplies_bfloat16_more_slowly_than_floats_gets_the_module_without_it() -> None:
    flags = X86["x86_64_v4_bf16"] | {"avx512_fp16"}
    assert choose_isa(ALL, flags | {"AuthenticAMD"}, "x86_64").isa == "x86_64_v4_bf16"
    assert choose_isa(ALL, flags - {"avx512_fp16"} | {"GenuineIntel"}, "x86_64").isa == "x86_64_v4_bf16"  # Cooper Lake
    slow = flags | {"GenuineIntel"}
    facts = choose_isa(ALL, slow, "x86_64")
    assert facts == NativeFacts("x86_64_v4_vnni", "x86_64_v4_vnni is the best that this CPU runs")
    other = choose_isa(["x86_64_v3", "x86_64_v4_bf16"], slow, "x86_64")
    assert (other.isa, "x86_64_v4_vnni would be better" in other.reason) == ("x86_64_v4_bf16", True)
    with_units = slow | X86["x86_64_v4_amx"]
    assert choose_isa(ALL, with_units, "x86_64", GRANTED).isa == "x86_64_v4_amx"
    assert choose_isa(ALL, with_units, "x86_64", "no").isa == "x86_64_v4_vnni"


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


@pytest.mark.parametrize(
    ("hwcap", "hwcap2", "isa", "lacks"),
    [
        pytest.param(0x119FFB, 0, "aarch64_dotprod", "lacks bf16, i8mm", id="neoverse-n1"),
        pytest.param(0x415FFB, 0, "aarch64", "lacks asimddp, bf16, i8mm", id="a64fx"),
        pytest.param(0x8FB, 0, "aarch64", "lacks asimddp, asimdrdm, atomics, bf16, i8mm", id="cortex-a72"),
        pytest.param(0xECFFFFFB, 0x7F877FFF, "aarch64_i8mm_bf16", None, id="all that an emulator knows"),
    ],
)
def test_an_arm_cpu_gets_the_best_module_by_the_bits_that_the_kernel_gives_the_process(
    tmp_path: Path, hwcap: int, hwcap2: int, isa: str, lacks: str | None
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/cpuinfo").write_text("flags\t\t: avx avx2\n")  # of the machine that runs an emulator
    (tmp_path / "proc/self/auxv").write_bytes(struct.pack("<10Q", 6, 4096, 16, hwcap, 26, hwcap2, 31, 7, 0, 0))
    flags = read_cpu_flags(tmp_path, "aarch64")
    assert choose_isa(CPU_FLAGS["aarch64"], flags, "aarch64").isa == isa
    best = choose_isa(["aarch64_i8mm_bf16"], flags, "aarch64")
    assert (lacks is None) == (best.isa == "aarch64_i8mm_bf16")
    assert lacks is None or f"installed for aarch64_i8mm_bf16, and this CPU {lacks}:" in best.reason


def test_every_64_bit_arm_cpu_runs_a_module_even_one_that_says_nothing_of_itself(tmp_path: Path) -> None:
    assert choose_isa(CPU_FLAGS["aarch64"], read_cpu_flags(tmp_path, "aarch64"), "aarch64").isa == "aarch64"


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
    assert read_cpu_flags(tmp_path, "x86_64") == frozenset()
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nFeatures\t: fp asimd\n")
    assert read_cpu_flags(tmp_path, "x86_64") == frozenset()


def test_a_cpu_has_the_flags_and_the_maker_that_it_lists(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(
        "processor\t: 0\nvendor_id\t: AuthenticAMD\nflags\t\t: avx avx2\n\nprocessor\t: 1\nflags\t\t: avx fma\n"
    )
    assert read_cpu_flags(tmp_path, "x86_64") == {"AuthenticAMD", "avx", "avx2"}


def test_what_is_chosen_for_this_machine_is_installed() -> None:
    facts = detect_native()
    assert facts.isa is None or facts.isa in installed_modules()


def test_a_cpu_whose_matrix_units_are_refused_runs_without_them_and_the_reason_says_so() -> None:
    facts = choose_isa(ALL, X86["x86_64_v4_amx"], "x86_64", "arch_prctl: Operation not permitted")
    assert (facts.isa, facts.matrix_units) == ("x86_64_v4_bf16", "arch_prctl: Operation not permitted")
    assert "the operating system refuses (arch_prctl: Operation not permitted)" in facts.reason
    lesser = choose_isa(["x86_64_v4"], X86["x86_64_v4_amx"], "x86_64", "no")
    assert lesser.isa == "x86_64_v4"
    assert "x86_64_v4_bf16 would be better without its matrix units" in lesser.reason
    alone = choose_isa(["x86_64_v4_amx"], X86["x86_64_v4_amx"], "x86_64", "no")
    assert alone.isa is None
    assert "refuses (no)" in alone.reason


def test_a_cpu_that_may_use_its_matrix_units_runs_the_kernels_that_do() -> None:
    assert choose_isa(ALL, X86["x86_64_v4_amx"], "x86_64", GRANTED).isa == "x86_64_v4_amx"
    facts = choose_isa(["x86_64_v4_bf16"], X86["x86_64_v4_amx"], "x86_64", GRANTED)
    assert facts.isa == "x86_64_v4_bf16"
    assert f"x86_64_v4_amx would be better: {HOW_TO_GET}" in facts.reason


def test_matrix_units_are_asked_for_only_where_the_cpu_has_all_of_them() -> None:
    def unasked() -> str | None:
        raise AssertionError("asked")

    assert ask_for_matrix_units(X86["x86_64_v4_bf16"] | {"amx_tile"}, unasked) is None
    assert ask_for_matrix_units(X86["x86_64_v4_amx"], lambda: None) == GRANTED
    assert ask_for_matrix_units(X86["x86_64_v4_amx"], lambda: "not today") == "not today"


def test_the_answer_of_the_operating_system_is_a_fact_of_the_device(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(f"flags : {' '.join(X86['x86_64_v4_amx'])}\n")
    assert detect_native(tmp_path, lambda: None).matrix_units == GRANTED
    assert detect_native(tmp_path, lambda: "not today").matrix_units == "not today"
    assert detect_native(tmp_path, lambda: "not today").isa != "x86_64_v4_amx"


def test_a_process_may_use_matrix_units_or_is_told_why_not() -> None:
    refused = request_matrix_units()
    if refused is None:
        assert read_cpu_flags() >= MATRIX_UNITS
    else:
        assert refused


def test_a_stand_in_is_never_chosen() -> None:
    names = {isa for isas in TEST_ISAS.values() for isa in isas}
    assert names
    for flags in (X86["x86_64_v4"], X86["x86_64_v4_amx"]):
        assert choose_isa(sorted(names), flags, "x86_64", GRANTED).isa is None


@pytest.mark.parametrize("machine", list(TABLE))
def test_the_build_reads_the_one_table_without_any_package(tmp_path: Path, machine: str) -> None:
    script, written = ROOT / "cmake/write_instruction_sets.py", tmp_path / "isas.cmake"
    subprocess.run([sys.executable, "-I", "-S", "-B", script, ROOT / "src", machine, written], check=True)
    values = {}
    for line in written.read_text().splitlines()[1:]:
        name, *words = line.removeprefix("set(").removesuffix(")").split()
        values[name] = words
    chosen, stand_ins = list(CPU_FLAGS[machine]), list(TEST_ISAS[machine])
    assert (values["known_isas"], values["stand_ins"]) == (chosen, stand_ins)
    assert values["runnable_isas"] == runnable_here()
    assert {name: values[f"flags_of_{name}"] for name in (*chosen, *stand_ins)} == {
        isa.name: list(isa.compiler_flags) for isa in TABLE[machine]
    }
