"""The benchmark beside other engines: what is read of their output, and what is made of the measurements."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import process
from benchmarks.peers.depths import depth_table
from benchmarks.peers.llama import better, decode_rates, prefill_rate
from benchmarks.peers.plot import draw, panels
from benchmarks.peers.process import PeerError, run
from benchmarks.peers.processor import Processor, kind_of
from benchmarks.peers.record import Record
from benchmarks.peers.report import make_report, ratios, share, step_bytes
from benchmarks.peers.table import markdown
from benchmarks.peers.to_gguf import hub_config
from benchmarks.peers.workload import Workload
from benchmarks.records import BEGIN, END, PAGE, RESULTS, records, section, with_records
from benchmarks.run import MODELS, SHAPES, USUAL, usual_engines
from benchmarks.speed_check import cells_of, figures, table, verdict
from ostinato.models.named_models import NAMED
from tests.support.patience import PATIENCE

SETUP = {"workload": {"batch_sizes": [1, 8], "prompt_len": 128, "output_len": 64, "prefill_len": 512}}
SETUP |= {"threads": 2, "rounds": 2, "processor": {"name": "A CPU (family 1, model 2)", "kind": "A kind"}}


def measurement(engine: str, number: int, prefill: float, decode: tuple[float, float], **more: Any) -> dict[str, Any]:
    figures = {"prefill": prefill, "decode": {"1": decode[0], "8": decode[1]}, "version": "1"}
    figures |= {"startup_seconds": 2.0, "peak_memory_bytes": 10**9, **more}
    where = {"round": number, "model": "small", "engine": engine}
    return {**where, "busy": 0.01, "date": f"2026-11-2{number}", "figures": figures}


def floor_measurement() -> dict[str, Any]:
    needed = {"weights": 800, "states": 150, "keys_and_values": 50, "total": 1000}
    figures = {"read": 1e5, "copy": 9e4, "decode_bytes": {"bfloat16": {"1": needed}}, "machine": {"cpu": "A CPU"}}
    return {"round": 0, "model": "small", "engine": "floor", "busy": 0.01, "date": "2026-11-20", "figures": figures}


def two_engines() -> dict[str, Any]:
    done = [
        floor_measurement(),
        measurement("ostinato", 0, 1000.0, (50.0, 300.0)),
        measurement("vllm", 0, 900.0, (40.0, 200.0), first_start_seconds=60.0, startup_seconds=0.0),
        measurement("ostinato", 1, 1200.0, (60.0, 320.0)),
        measurement("vllm", 1, 800.0, (44.0, 180.0), startup_seconds=16.0, peak_memory_bytes=6 * 10**9),
    ]
    del done[2]["figures"]["startup_seconds"]
    failed = {"round": 0, "model": "small", "engine": "llama.cpp", "busy": 0.01, "date": "2026-11-20"}
    done.append({**failed, "error": "ValueError: no such model"})
    return make_report(SETUP, done, {"transformers": "it is not installed"})


def test_llama_bench_gives_the_median_of_its_repetitions_of_the_right_prompt() -> None:
    rows = [
        {"n_prompt": 0, "n_gen": 8, "samples_ts": [1.0]},
        {"n_prompt": 512, "n_gen": 0, "samples_ts": [7.0, 3.0, 5.0]},
    ]
    lines = json.dumps([{"build_commit": "abc", **row} for row in rows], indent=2).splitlines()
    assert prefill_rate(["some warning", *lines], 512) == (5.0, "build abc")
    with pytest.raises(PeerError, match="256"):
        prefill_rate(lines, 256)


def test_batched_bench_counts_the_tokens_of_all_rows() -> None:
    lines = ["", '{"pp": 128, "tg": 64, "pl": 1, "t_tg": 2.0}', "text", '{"pp": 128, "tg": 64, "pl": 8, "t_tg": 4.0}']
    assert decode_rates(lines, (1, 8)) == {"1": 32.0, "8": 128.0}
    with pytest.raises(PeerError, match="batch size 32"):
        decode_rates(lines, (1, 8, 32))


def test_llama_cpp_has_the_better_of_two_settings_for_each_figure() -> None:
    one = measurement("llama.cpp", 0, 900.0, (50.0, 300.0), startup_seconds=3.0)["figures"]
    other = measurement("llama.cpp", 0, 800.0, (60.0, 200.0), peak_memory_bytes=10**8)["figures"]
    for figures_ in (better(one, other), better(other, one)):
        assert (figures_["prefill"], figures_["decode"]) == (900.0, {"1": 60.0, "8": 300.0})
        assert (figures_["startup_seconds"], figures_["peak_memory_bytes"]) == (2.0, 10**8)


def test_a_model_that_is_one_file_is_measured_with_the_engines_of_its_kind() -> None:
    assert usual_engines("gemma3-270m") == ["ostinato-q4_k_m", "llama.cpp-q4_k_m"]
    assert usual_engines("smollm2") == ["ostinato-q4_1", "llama.cpp-q4_1"]
    for model in MODELS:
        assert model in NAMED or ((SHAPES / model / "config.json").exists() and usual_engines(model) == USUAL)


def test_a_round_counts_neither_its_start_nor_what_warms_up() -> None:
    workload = Workload(batch_sizes=(1, 2), prompt_len=4, output_len=3, prefill_len=10, prefills=1, warm_up_len=2)
    batches = workload.batches(vocab_size=100, number=0)
    assert [(len(batch["prompts"]), len(batch["prompts"][0]), batch["output_len"]) for batch in batches] == [
        *[(1, 4, 1), (1, 10, 1), (1, 10, 1)],
        *[(1, 4, 2), (1, 4, 3), (2, 4, 2), (2, 4, 3)],
    ]

    def trace(*token_times: list[float]) -> dict[str, Any]:
        return {"prompt_tokens": 10, "token_times": list(token_times), "step_ends": token_times[0]}

    wrong = trace([9.0, 99.0])
    counted = [trace([2.0]), trace([1.0, 2.0, 5.0]), trace([1.0, 1.5, 2.0], [1.0, 1.5, 2.0])]
    rates = workload.rates([wrong, wrong, counted[0], wrong, counted[1], wrong, counted[2]])
    assert rates == {"prefill": 5.0, "decode": {"1": 0.5, "2": 4.0}}


def test_no_two_rounds_have_a_prompt_in_common() -> None:
    prompts = [
        tuple(prompt)
        for number in range(3)
        for batch in Workload(batch_sizes=(1, 8)).batches(32000, number)
        for prompt in batch["prompts"]
    ]
    assert len(set(prompts)) == len(prompts)


def test_figures_are_medians_over_the_rounds() -> None:
    engines = two_engines()["models"]["small"]["engines"]
    assert engines["ostinato"]["prefill"] == {"median": 1100.0, "min": 1000.0, "max": 1200.0}
    assert engines["ostinato"]["decode"]["8"]["median"] == 310.0
    assert engines["llama.cpp"] == {"rounds": 0, "errors": ["ValueError: no such model"], "floor_share": {}}


def test_a_start_that_compiles_is_told_apart_from_later_ones() -> None:
    vllm = two_engines()["models"]["small"]["engines"]["vllm"]
    assert vllm["startup_seconds"]["median"] == 16.0
    assert vllm["first_start_seconds"]["median"] == 60.0


def test_ratios_are_beside_the_best_rival_of_each_figure() -> None:
    def engine(prefill: float, one: float) -> dict[str, Any]:
        rates = {"prefill": {"median": prefill}, "decode": {"1": {"median": one}}}
        return rates | {"startup_seconds": {"median": 2.0}, "peak_memory_bytes": {"median": 1.0}}

    engines = {"ostinato": engine(100.0, 30.0), "vllm": engine(80.0, 10.0), "llama.cpp": engine(50.0, 20.0)}
    found = ratios(engines, "ostinato")
    assert (found["prefill"], found["decode"]["1"]) == (1.25, 1.5)
    assert ratios({"ostinato": engine(1.0, 1.0)}, "ostinato")["decode"]["1"] is None


def test_the_floor_is_the_step_s_bytes_at_full_bandwidth() -> None:
    assert share(rate=50.0, size=1, needed=1000.0, bandwidth=1e5) == pytest.approx(0.5)
    assert share(rate=400.0, size=8, needed=1000.0, bandwidth=1e5) == pytest.approx(0.5)
    assert two_engines()["models"]["small"]["engines"]["ostinato"]["floor_share"]["1"] == pytest.approx(0.55)


def test_weights_of_eight_bits_have_a_floor_of_their_own() -> None:
    parts = {"weights": 640, "total": 1000}
    needed = {"bfloat16": {"1": parts}}
    assert step_bytes(needed, "llama.cpp", "1") == 1000
    assert step_bytes(needed, "llama.cpp-q8_0", "1") == 1000 - 300
    assert step_bytes(needed, "ostinato-int8", "1") is None
    assert step_bytes({**needed, "int8": {"1": {"weights": 320, "total": 680}}}, "ostinato-int8", "1") == 680


def test_the_table_names_what_failed_and_what_was_left_out() -> None:
    table = markdown(two_engines())
    assert "| ostinato 1 | 1100 | 55.0 | 310.0 | 55% | 2.0 | 1000 |" in table
    assert "- llama.cpp failed: ValueError: no such model" in table
    assert "- transformers was not measured: it is not installed" in table


def test_a_record_says_of_which_processor_it_is_and_when_it_was_measured() -> None:
    report = two_engines()
    assert report["measured"] == ["2026-11-20", "2026-11-21"]
    said = "A kind: A CPU (family 1, model 2), 2 threads, median of 2 round(s), measured 2026-11-20 to 2026-11-21."
    assert markdown(report).startswith(said)
    assert "measured 2026-11-20." in markdown(report | {"measured": ["2026-11-20"] * 2})


@pytest.mark.parametrize(
    ("name", "flags", "kind", "folder"),
    [
        ("AMD EPYC (family 25, model 17)", {"avx512f"}, "AMD Zen 4", "amd-zen-4"),
        ("AMD Ryzen 9 7950X (family 25, model 97)", {"avx512f"}, "AMD Zen 4", "amd-zen-4"),
        ("AMD EPYC 7763 (family 25, model 1)", {"avx2"}, "AMD Zen 3", "amd-zen-3"),
        ("AMD EPYC (family 26, model 2)", {"avx512f"}, "AMD Zen 5", "amd-zen-5"),
        (
            "Intel Xeon (family 6, model 143)",
            {"avx512f", "avx512_bf16", "amx_tile"},
            "Intel with AMX",
            "intel-with-amx",
        ),
        ("Intel Xeon (family 6, model 85)", {"avx512f"}, "Intel with AVX-512", "intel-with-avx-512"),
        ("CPU (part 0x41 0xd40)", set(), "CPU (part 0x41 0xd40)", "cpu-part-0x41-0xd40"),
    ],
)
def test_processors_that_run_alike_are_of_one_kind(name: str, flags: set[str], kind: str, folder: str) -> None:
    assert kind_of(name, flags) == kind
    assert Processor(name, kind).folder == folder


def test_a_record_shows_engines_beside_each_other_in_their_order() -> None:
    lines = section(two_engines()).splitlines()
    assert lines[0] == "### A kind"
    assert "measured 2026-11-20 to 2026-11-21." in lines[2]
    assert (
        lines[-1] == "| `small` | ostinato / vllm | 1100 / 850 | 55.0 / 42.0 | 310 / 190 | 2.0 / 16.0 | 1000 / 3500 |"
    )


def test_records_take_the_place_of_those_that_stood_in_the_page() -> None:
    page = f"before\n{BEGIN}\nold\n{END}after\n"
    once = with_records(page, [two_engines()])
    assert "old" not in once
    assert once.startswith("before\n")
    assert once.endswith("after\n")
    assert with_records(once, [two_engines()]) == once


def test_the_page_shows_the_records_that_are_kept() -> None:
    page = PAGE.read_text()
    assert with_records(page, records(RESULTS)) == page


def test_the_table_says_where_the_machine_was_not_quiet() -> None:
    report = two_engines()
    assert "not quiet" not in markdown(report)
    assert "20% of its time" in markdown(report | {"busy": 0.2})


def test_the_plot_has_a_gap_where_an_engine_has_no_figure(tmp_path: Path) -> None:
    report = two_engines()
    shown = panels(report)
    assert shown["decode, batch 8, tokens/s"] == {"ostinato": [310.0], "vllm": [190.0]}
    assert shown["peak memory, GB"]["vllm"] == [3.5]
    draw(report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_a_run_that_was_cut_off_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "measurements.jsonl"
    record = Record(path, SETUP)
    record.add(measurement("ostinato", 0, 1.0, (1.0, 1.0)))
    record.add({"round": 0, "model": "small", "engine": "vllm", "busy": 0.0, "error": "it fell"})
    with path.open("a") as file:
        file.write('{"round": 1, "mod')
    again = Record(path, SETUP)
    assert again.is_done((0, "small", "ostinato"))
    assert not again.is_done((0, "small", "vllm"))
    again.add(measurement("vllm", 0, 1.0, (1.0, 1.0)))
    assert Record(path, SETUP).is_done((0, "small", "vllm"))
    with pytest.raises(ValueError, match="another set-up"):
        Record(path, {**SETUP, "threads": 4})


def test_a_process_that_fails_says_why_in_one_line() -> None:
    script = (
        "import sys; print('working'); sys.stderr.write('ValueError: 3 is too many\\n  at the end\\n'); sys.exit(2)"
    )
    with pytest.raises(PeerError, match=r"^ValueError: 3 is too many \(exit code 2\)$"):
        run([sys.executable, "-c", script], timeout=60)


def test_a_process_that_does_not_end_is_ended() -> None:
    with pytest.raises(PeerError, match="not done after 1 second"):
        run([sys.executable, "-c", "import time; time.sleep(60)"], timeout=1)


def test_memory_is_that_of_a_process_and_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured, measure = tmp_path / "measured", process.tree_memory

    def noted(root: int) -> int:
        size = measure(root)
        if size > 240e6:
            measured.touch()
        return size

    monkeypatch.setattr(process, "tree_memory", noted)
    wait = f"while not os.path.exists({str(measured)!r}): time.sleep(0.01)"
    child = f"import os, time\nblock = bytearray(150_000_000)\n{wait}"
    script = (
        f"import subprocess, sys; block = bytearray(100_000_000); subprocess.run([sys.executable, '-c', {child!r}])"
    )
    finished = run([sys.executable, "-c", script], timeout=PATIENCE)
    assert 240e6 < finished.peak_memory_bytes < 500e6


def test_the_converter_reads_the_names_of_the_hub() -> None:
    config = {"model_type": "nemotron_h", "layers_block_type": ["linear_attention", "mlp", "full_attention"]}
    assert hub_config(config, {"num_experts_per_tok": 2}) == {
        "model_type": "nemotron_h",
        "num_hidden_layers": 3,
        "hybrid_override_pattern": "M-*",
    }
    falcon = {"model_type": "falcon_h1", "hidden_size": 8}
    assert hub_config(falcon, {"hidden_size": 1, "key_multiplier": 1.0}) == {**falcon, "key_multiplier": 1.0}


def test_the_speed_check_judges_each_cell_by_its_record():
    def report(seconds: float, floor: float) -> dict[str, Any]:
        total = {"total": {"seconds": seconds, "floor_seconds": floor}}
        return {"decode": [{"batch_size": 1, **total}], "prefill": {"tokens": 512, **total}}

    rounds = [cells_of(report(*each), "small") for each in ((3.0, 2.0), (2.0, 1.5), (4.0, 1.0))]
    assert rounds[0] == {"small, 1 rows": (3.0, 2.0), "small, prompt of 512": (3.0, 2.0)}
    found = figures(rounds)
    assert found == {"small, 1 rows": 2.0, "small, prompt of 512": 2.0}  # the least of each, of whichever round
    assert [verdict(2.0, record) for record in (None, 2.0, 1.9, 1.5, 2.5)] == [
        "new",
        "same",
        "same",
        "worse by 33%",
        "better by 20%",
    ]
    lines = table(found, {"small, 1 rows": 1.0}).splitlines()
    assert lines[1].split() == ["small,", "1", "rows", "2.00", "1.00", "worse", "by", "100%"]
    assert lines[2].endswith("-  new")


def test_a_cell_at_depth_is_bold_where_it_misses_its_aim() -> None:
    cell = {"model": "small", "keys": "int8", "depth": 2048, "rows": 8, "ostinato": 120.0, "floor": 0.79}
    fast, alone = cell | {"floor": 0.8, "llama.cpp": 80.0}, cell | {"floor": None, "llama.cpp": None}
    lines = depth_table([cell | {"llama.cpp": 100.0}, fast, alone, fast | {"rows": 1, "llama.cpp": 110.0}]).splitlines()
    assert [line.split(" | ", 4)[4] for line in lines[2:]] == [
        "120.0 | **0.79** | 100.0 | **1.20** |",
        "120.0 | 0.80 | 80.0 | 1.50 |",
        "120.0 | - | - | - |",
        "120.0 | 0.80 | 110.0 | 1.09 |",  # the aim beside llama.cpp is of 8 rows
    ]
