"""Benchmarks: the figures from plain numbers, and every report on tiny models."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch

from ostinato import ConfigError, EngineConfig
from ostinato.bench.contention import BUSY_CODE, ContentionBench, busy_processes, contention
from ostinato.bench.engine_driver import Workload, bench_config, run_in_process
from ostinato.bench.peers import check_peer, compare
from ostinato.bench.roofline import Bandwidth, DecodeBytes, decode_bytes, floor_figures, measure_bandwidth
from ostinato.bench.statistics import RoundTrace, percentiles, spread
from ostinato.bench.throughput import (
    PHASES,
    latency,
    latency_figures,
    record_cost,
    startup,
    throughput,
    throughput_figures,
    verify_cost,
)
from ostinato.cli.main import main
from ostinato.models.checkpoint import model_spec, read_config
from ostinato.plan.device.detect import find_device
from ostinato.plan.plan import make_plan
from tests.support.checkpoints import VOCAB_SIZE, checkpoint

MODELS = Path(__file__).parents[2] / "benchmarks" / "models"
TINY = {"threads": 1, "dtype": "float32", "cache_memory": "16MiB"}

ROUND = RoundTrace(
    prompt_tokens=30,
    token_times=[[1.0, 2.0, 4.0], [2.0, 4.0, 5.0]],
    step_ends=[1.0, 2.0, 4.0, 5.0],
)
"""Two requests of three tokens; the second gets its first one a step later, so decoding begins at 2 seconds."""


def quiet(_: str) -> None:
    """Reports nothing."""


def test_decode_counts_only_what_comes_after_every_first_token() -> None:
    assert ROUND.prefill_end == 2.0
    assert ROUND.decode_tokens == 3
    assert ROUND.decode_step_seconds == [2.0, 1.0]
    figures = throughput_figures([ROUND])
    assert figures["total_tokens_per_second"]["median"] == pytest.approx(36 / 5)
    assert figures["output_tokens_per_second"]["median"] == pytest.approx(6 / 5)
    assert figures["prefill_tokens_per_second"]["median"] == pytest.approx(30 / 2)
    assert figures["decode_tokens_per_second"]["median"] == pytest.approx(3 / 3)
    assert (figures["steps"], figures["decode_steps"]) == (4, 2)


def test_a_round_of_one_token_has_no_decode_rate() -> None:
    figures = throughput_figures([RoundTrace(8, [[0.5]], [0.5])])
    assert figures["decode_tokens_per_second"] is None
    assert figures["decode_step_seconds"] is None
    assert figures["prefill_tokens_per_second"]["median"] == 16


def test_rates_are_spread_over_rounds() -> None:
    slow = RoundTrace(30, [[t * 2 for t in times] for times in ROUND.token_times], [t * 2 for t in ROUND.step_ends])
    assert throughput_figures([ROUND, slow, ROUND])["seconds"] == {"median": 5.0, "min": 5.0, "max": 10.0}
    assert spread([]) is None


def test_latencies_are_taken_over_all_requests() -> None:
    figures = latency_figures([ROUND])
    assert figures["time_to_first_token"] == {"p50": 1.5, "p99": 2.0, "max": 2.0}
    assert figures["inter_token_latency"] == {"p50": 1.5, "p99": 2.0, "max": 2.0}


def test_the_99th_percentile_passes_over_one_in_a_hundred() -> None:
    assert percentiles([float(n) for n in range(1, 101)]) == {"p50": 50.5, "p99": 99.0, "max": 100.0}
    assert percentiles([]) is None


def test_prompts_differ_between_rounds_and_repeat_between_runs() -> None:
    workload = Workload(prompt_len=20, output_len=4, batch_sizes=(3,), rounds=2)
    first, second = (workload.prompts(3, VOCAB_SIZE, number) for number in (0, 1))
    assert first == workload.prompts(3, VOCAB_SIZE, 0)
    assert [len(prompt) for prompt in first] == [20] * 3
    assert len({tuple(prompt) for prompt in (*first, *second)}) == 6
    assert all(0 <= token < VOCAB_SIZE for prompt in first for token in prompt)


def test_settings_too_small_for_the_workload_are_refused_with_what_it_needs() -> None:
    workload = Workload(prompt_len=20, output_len=4, batch_sizes=(1, 8), rounds=1)
    config = bench_config({}, workload)
    assert (config.max_num_seqs, config.max_model_len) == (8, 24)
    assert bench_config({"max_num_seqs": 9}, workload).max_num_seqs == 9
    for setting, least in (("max_num_seqs", 8), ("max_model_len", 24)):
        with pytest.raises(ConfigError) as refused:
            bench_config({setting: least - 1}, workload)
        assert [(remedy.setting, remedy.value) for remedy in refused.value.remedies] == [(setting, least)]


@pytest.mark.parametrize("name", ["nemotron_h_dense", "llama"])
def test_the_floor_counts_weights_once_and_states_and_keys_per_row(name: str) -> None:
    spec = model_spec(read_config(checkpoint(name)))
    plan = make_plan(EngineConfig(model="tiny", dtype="bfloat16"), spec, find_device("cpu"))
    one, four = (decode_bytes(spec, plan, rows, context=100) for rows in (1, 4))
    assert one is not None
    assert four is not None
    assert one.weights == four.weights
    embedding = 0 if spec.tied_embeddings else spec.vocab_size * spec.hidden_size * 2
    assert one.weights == plan.memory.weights - embedding
    hidden = decode_bytes(spec, plan, 1, context=100, with_logits=False)
    assert hidden is not None
    assert one.weights - hidden.weights == spec.vocab_size * spec.hidden_size * 2
    assert (one.states > 0) == (name == "nemotron_h_dense")
    assert four.states == 4 * one.states == 8 * plan.memory.state_slot
    per_token = sum(2 * layer.num_kv_heads * layer.head_dim * 2 for layer in spec.attention_layers)
    assert one.keys_and_values == 100 * per_token
    assert four.total == one.weights + 4 * (one.states + one.keys_and_values)


def test_a_model_with_experts_has_no_floor() -> None:
    spec = model_spec(read_config(checkpoint("nemotron_h")))
    plan = make_plan(EngineConfig(model="tiny"), spec, find_device("cpu"))
    assert decode_bytes(spec, plan, rows=1, context=10) is None


def test_the_part_of_the_floor_is_its_time_over_the_measured_one() -> None:
    figures = floor_figures(DecodeBytes(6, 3, 1), Bandwidth(read=4, copy=5), step_seconds=8)
    assert figures["step_bytes"]["total"] == 10
    assert figures["step_seconds"] == 2
    assert figures["fraction_reached"] == 0.25


def test_bandwidth_is_measured_by_reading_and_copying() -> None:
    bandwidth = measure_bandwidth(torch.device("cpu"), size=2**22)
    assert 1e6 < bandwidth.read < 1e13
    assert 1e6 < bandwidth.copy < 1e13


def test_throughput_reports_each_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ostinato.bench.throughput.measure_bandwidth", lambda device, isa: measure_bandwidth(device, 2**22, isa)
    )
    workload = Workload(prompt_len=12, output_len=5, batch_sizes=(1, 3), rounds=2)
    settings = {**TINY, "model": str(checkpoint("nemotron_h_dense")), "max_num_batched_tokens": 19}
    report = throughput(settings, workload, quiet).data
    assert report["command"] == "throughput"
    assert report["model"]["architecture"] == "nemotron_h"
    assert (report["settings"]["max_num_batched_tokens"], report["settings"]["output_len"]) == (19, 5)
    assert {"cpu", "cores", "threads", "torch", "read_bytes_per_second"} <= report["machine"].keys()
    one, three = report["results"]
    assert (one["batch_size"], one["steps"], one["decode_steps"]) == (1, 5, 4)
    # 36 prompt tokens in steps of 19 take two; in the second, a first request already decodes.
    assert (three["batch_size"], three["steps"], three["decode_steps"]) == (3, 6, 4)
    for result in (one, three):
        assert 0 < result["floor"]["fraction_reached"] < 1
        assert result["decode_tokens_per_second"]["median"] > 0
        assert result["preemptions"] == 0
        assert sum(result["step_modes"].values()) > 2 * result["steps"]  # the warm-up has some more
        assert result["step_modes"]["full"] >= 2 * result["decode_steps"]


def test_latency_reports_each_batch_size() -> None:
    workload = Workload(prompt_len=12, output_len=5, batch_sizes=(1, 2), rounds=2)
    report = latency({**TINY, "model": str(checkpoint("llama"))}, workload, quiet).data
    for result, size in zip(report["results"], (1, 2), strict=True):
        assert result["batch_size"] == size
        for figures in (result["time_to_first_token"], result["inter_token_latency"]):
            assert 0 < figures["p50"] <= figures["p99"] <= figures["max"]


def test_contention_reports_each_workload_quiet_and_beside_each_number_of_busy_processes() -> None:
    bench = ContentionBench(batch_sizes=(1, 2), prompt_len=12, output_len=3, busy=(1,), rounds=2)
    report = contention({**TINY, "model": str(checkpoint("llama"))}, bench, quiet).data
    work = ("decode, 1 row", "decode, 2 rows", "prompt of 12")
    cells = [(result["work"], result["busy"]) for result in report["results"]]
    assert cells == [(name, busy) for name in work for busy in (0, 1)]
    cores = report["machine"]["cores"]
    for result in report["results"]:
        assert 0 < result["tokens_per_second"]["min"] <= result["tokens_per_second"]["max"]
        assert result["fair_share"] == cores / (cores + result["busy"])
        assert result["of_fair_share"] == pytest.approx(result["of_quiet"]["median"] / result["fair_share"])
        if result["busy"] == 0:
            assert result["of_quiet"] == {"median": 1.0, "min": 1.0, "max": 1.0}


def test_the_cost_of_records_is_the_speed_with_one_over_that_without_on_the_same_work() -> None:
    workload = Workload(prompt_len=12, output_len=3, batch_sizes=(1, 2), rounds=2)
    report = record_cost({**TINY, "model": str(checkpoint("llama"))}, workload, quiet).data
    rates = [(size, rate) for size in (1, 2) for rate in ("total", "decode", "processor")]
    assert [(result["batch_size"], result["rate"]) for result in report["results"]] == rates
    for result in report["results"]:
        # Rounds of one side lie within its spread, so each ratio lies between the quotients of the extremes.
        plain, recorded, ratio = (result[name] for name in ("plain", "recorded", "ratio"))
        assert recorded["min"] / plain["max"] <= ratio["min"] <= ratio["max"] <= recorded["max"] / plain["min"]
    # The engine that records saw the warm-up and both rounds of each size.
    assert report["record"]["requests"] == 3 * (1 + 2)
    assert not Path(report["record"]["folder"]).exists()
    with pytest.raises(ConfigError, match="record is what the benchmark compares"):
        record_cost({**TINY, "model": str(checkpoint("llama")), "record": "there"}, workload, quiet)


def test_the_cost_of_online_checks_is_that_of_checking_every_request_times_the_rate() -> None:
    workload = Workload(prompt_len=12, output_len=3, batch_sizes=(1, 2), rounds=2)
    report = verify_cost({**TINY, "model": str(checkpoint("llama"))}, workload, 0.25, quiet).data
    assert [result["rate"] for result in report["results"]] == ["total", "decode", "processor"] * 2
    assert [check["batch_size"] for check in report["check"]] == [1, 2]
    for check in report["check"]:
        assert check["cost"] > 0
        assert check["share"] == 0.25 * check["cost"]


def test_busy_processes_end_with_what_they_were_started_for() -> None:
    def running() -> int:
        children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
        return sum(BUSY_CODE.splitlines()[0] in Path(f"/proc/{child}/cmdline").read_text() for child in children)

    with busy_processes(2):
        assert running() == 2
    assert running() == 0


def test_startup_times_a_whole_process() -> None:
    workload = Workload(prompt_len=12, output_len=1, batch_sizes=(1,), rounds=1)
    report = startup({**TINY, "model": str(checkpoint("llama"))}, workload, quiet).data
    [result] = report["results"]
    medians = {phase: result["seconds"][phase]["median"] for phase in (*PHASES, "total")}
    assert min(medians.values()) > 0
    assert medians.pop("total") == pytest.approx(sum(medians.values()))
    assert result["peak_memory_bytes"] > 2**26


def test_an_error_in_a_process_is_raised_in_the_one_that_asked() -> None:
    batches = [{"prompts": [[1, 2, 3]], "output_len": 1}]
    with pytest.raises(ConfigError, match="max_num_seqs") as refused:
        run_in_process("ostinato", {"settings": {"model": "demo", "max_num_seqs": 0}, "batches": batches})
    assert [(remedy.setting, remedy.value) for remedy in refused.value.remedies] == [("max_num_seqs", 1)]


@pytest.mark.slow
def test_a_comparison_runs_both_engines_on_every_batch_size(tmp_path: Path) -> None:
    config = json.loads((checkpoint("nemotron_h_dense") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    workload = Workload(prompt_len=12, output_len=5, batch_sizes=(1, 2), rounds=1)
    report = compare({**TINY, "model": str(tmp_path), "random_weights": True}, workload, "transformers", quiet).data
    assert report["compare"]["peer"] == "transformers"
    assert report["settings"]["rounds"] == 1
    for result, size in zip(report["results"], (1, 2), strict=True):
        assert result["batch_size"] == size
        ours, theirs = (result[name]["decode_tokens_per_second"]["median"] for name in ("ostinato", "transformers"))
        assert result["ratio"]["decode_tokens_per_second"] == pytest.approx(ours / theirs)
        assert result["transformers"]["steps"] == result["ostinato"]["steps"] == 5
        assert result["transformers"]["peak_memory_bytes"] > 2**26


def test_a_peer_that_is_unknown_or_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="transformers"):
        check_peer("another")
    monkeypatch.setattr("ostinato.bench.peers.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install transformers"):
        check_peer("transformers")


@pytest.mark.parametrize("command", ["throughput", "latency", "contention", "record", "verify-rate"])
def test_the_command_prints_tables_or_json(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "ostinato.bench.throughput.measure_bandwidth", lambda device, isa: measure_bandwidth(device, 2**22, isa)
    )
    flags = ["--batch-sizes", "1,2", "--prompt-len", "4", "--output-len", "3", "--rounds", "1"]
    flags += ["--threads", "1", "--cache-memory", "16MiB"]
    printed = []
    for last in ([], ["--json"]):
        with pytest.raises(SystemExit) as end:
            main(["bench", command, str(checkpoint("llama")), *flags, *last])
        assert not end.value.code
        printed.append(capsys.readouterr().out)
    tables, report = printed
    assert any(each in tables for each in ("tokens/s", "first token p50", "fair share:"))
    paired = dict.fromkeys(("record", "verify-rate"), [1] * 3 + [2] * 3)
    sizes = {"contention": [None] * 9, **paired}.get(command, [1, 2])
    assert [result.get("batch_size") for result in json.loads(report)["results"]] == sizes


@pytest.mark.parametrize("sizes", ["", "0", "1,,2", "many"])
def test_batch_sizes_that_are_none_are_refused(sizes: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", "latency", "demo", "--batch-sizes", sizes])
    assert end.value.code == 2
    assert "--batch-sizes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "millions", "layers"),
    [
        ("nemotron-h-300m", 301, {"mamba2": 12, "attention": 3, "mlp": 15}),
        ("granite-dense-180m", 182, {"mamba2": 17, "attention": 2}),
        ("falcon-h1-170m", 174, {"hybrid": 18}),
        ("qwen3-410m", 410, None),
    ],
)
def test_the_shipped_shapes_are_of_the_sizes_that_they_are_named_for(
    name: str, millions: int, layers: dict[str, int] | None
) -> None:
    spec = model_spec(read_config(MODELS / name))
    plan = make_plan(EngineConfig(model=name), spec, find_device("cpu"))
    assert round(spec.num_parameters / 1e6) == millions
    assert spec.dtype == "bfloat16"
    assert layers is None or plan.model.layers == layers
