"""The predicted time of steps, from rates that are given: no test looks at a clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ostinato import EngineConfig
from ostinato.models.checkpoint import load_spec
from ostinato.ops.kernel_cost import KernelCost, StepShape
from ostinato.plan.device.detect import detect
from ostinato.plan.device.gpu_catalogue import CATALOGUE, DeviceSpec
from ostinato.plan.device.kernel_support import NativeFacts
from ostinato.plan.device.linux import processor_of
from ostinato.plan.device.measured_rates import KernelRate, Rates, cache_directory, kept_rates, kernels_of, save_rates
from ostinato.plan.kernel_costs import LOGITS, expected_experts, kernel_work
from ostinato.plan.layer_specs import ExpertsSpec
from ostinato.plan.plan import Plan, make_plan
from ostinato.plan.prediction import ENGINE, HOW_TO_MEASURE, StepPredictor, make_machine, seconds_at
from ostinato.plan.render.tables import print_plan, summary_line
from tests.support.checkpoints import checkpoint

BANDWIDTH, PEAK = 50e9, 500e9


def rate(operation: str, storage: str, way: str, tokens: int, num_bytes: float, flops: float) -> KernelRate:
    return KernelRate(operation, storage, way, tokens, num_bytes, flops)  # type: ignore[arg-type]


def made_rates(dtype: str = "float32", threads: int = 2) -> Rates:
    """Every kernel reads 50 GB/s and computes 500 GFLOP/s, whatever its tokens."""
    made = []
    for storage in (dtype, "int8"):
        made += [rate("linear", storage, "decode", tokens, BANDWIDTH, PEAK) for tokens in (1, 512)]
    for way, names in {
        "decode": ("state_update", "causal_conv1d", "attention", "rms_norm", "gated_rms_norm", "rotary"),
        "prompt": ("ssd_scan", "causal_conv1d", "attention", "rms_norm", "gated_rms_norm", "rotary"),
    }.items():
        made += [rate(name, dtype, way, 1, BANDWIDTH, PEAK) for name in names]
    return Rates(
        processor="a processor",
        kernels="x86_64_v3 of a test",
        threads=threads,
        dtype=dtype,
        measured="2026-11-22 21:00 UTC",
        bandwidth=BANDWIDTH,
        product_rate=PEAK,
        call_seconds=1e-6,
        step_seconds=5e-4,
        row_seconds=1e-5,
        other_load=0.02,
        rates=tuple(made),
    )


def cpu(*rates: Rates) -> DeviceSpec:
    native = NativeFacts("x86_64_v3", "it is the best")
    return DeviceSpec("cpu", "cpu", 2**34, 2, None, None, "a test", native, rates)


def plan_for(name: str = "nemotron_h_dense", device: DeviceSpec | None = None, **settings: Any) -> Plan:
    config = EngineConfig(model=str(checkpoint(name)), dtype="float32", **settings)
    return make_plan(config, load_spec(config), device or cpu(made_rates()))


def machine(name: str = "nemotron_h_dense", rates: Rates | None = None) -> StepPredictor:
    spec = load_spec(EngineConfig(model=str(checkpoint(name)), dtype="float32"))
    return StepPredictor(spec, "float32", "float32", BANDWIDTH, PEAK, rates)


def test_a_kernel_takes_as_long_as_its_bytes_or_its_operations_whichever_are_slower() -> None:
    points = [rate("linear", "bfloat16", "decode", 1, num_bytes=10.0, flops=100.0)]
    assert seconds_at(points, KernelCost(num_bytes=30, flops=100), tokens=1) == 3
    assert seconds_at(points, KernelCost(num_bytes=30, flops=700), tokens=1) == 7


def test_between_two_numbers_of_tokens_the_time_of_a_matrix_grows_evenly() -> None:
    """100 bytes, 50 weights: 10 s for 8 tokens and 30 s for 16, as measured."""
    points = [
        rate("linear", "bfloat16", "decode", 8, num_bytes=100 / 10, flops=2 * 50 * 8 / 10),
        rate("linear", "bfloat16", "decode", 16, num_bytes=100 / 30, flops=2 * 50 * 16 / 30),
    ]
    for tokens, seconds in {8: 10, 10: 15, 12: 20, 16: 30}.items():
        assert seconds_at(points, KernelCost(100, 2 * 50 * tokens), tokens) == pytest.approx(seconds)


def test_beyond_what_was_measured_rates_stay_as_they_are() -> None:
    points = [rate("linear", "bfloat16", "decode", tokens, 10.0, 100.0 * tokens) for tokens in (1, 8)]
    assert seconds_at(points, KernelCost(100, 64000), tokens=32) == pytest.approx(64000 / 800)


def test_with_every_kernel_at_the_roofs_a_step_takes_its_floor_its_calls_and_the_engine() -> None:
    rates = made_rates()
    step = StepShape(rows=3, tokens_per_row=1, context=40, decodes=True)
    found, floor = machine(rates=rates).predict(step), machine().predict(step)
    calls = sum(each.operation in found.parts for each in machine().model.calls.calls)
    engine = rates.step_seconds + 3 * rates.row_seconds
    assert found.parts[ENGINE] == pytest.approx(engine)
    passes = {"rms_norm", "gated_rms_norm", "embedding", "rotary"} & found.parts.keys()
    activations = sum(
        each.elements * 3 * 4 / BANDWIDTH for each in machine().model.calls.calls if each.operation in passes
    )
    assert found.seconds == pytest.approx(floor.seconds + calls * rates.call_seconds + engine + activations)


def test_the_work_of_a_predicted_step_is_that_of_the_floor() -> None:
    of = machine()
    step = StepShape(rows=2, tokens_per_row=1, context=9, decodes=True)
    known = kernel_work(of.model, "float32", "float32", step)
    found = of.predict(step)
    assert found.parts.keys() == known.keys()
    for name, work in known.items():
        assert work is not None
        assert found.parts[name] == pytest.approx(max(work.num_bytes / BANDWIDTH, work.flops / PEAK))


def test_the_largest_part_is_named_with_what_it_waits_for() -> None:
    one = machine().predict(StepShape(1, 1, 10, decodes=True))
    many = machine().predict(StepShape(1, 512, 0, decodes=False))
    assert one.parts[one.largest] == max(one.parts.values())
    assert (one.bound, many.bound) == ("memory", "arithmetic")
    assert many.tokens_per_second == pytest.approx(512 / many.seconds)
    assert many.model_seconds == pytest.approx(many.seconds - many.parts[LOGITS])


def test_experts_are_read_as_if_tokens_chose_them_at_random() -> None:
    experts = ExpertsSpec(num_experts=8, top_k=2, size=4, intermediate_size=4)
    assert expected_experts(experts, 1) == 2
    assert expected_experts(experts, 2) == pytest.approx(2 + 2 * 6 / 8)
    assert expected_experts(experts, 1000) == pytest.approx(8)


@pytest.mark.parametrize("name", ["nemotron_h", "granitemoehybrid", "falcon_h1", "qwen3", "mamba2"])
def test_steps_of_every_kind_of_model_are_predicted(name: str) -> None:
    plan = plan_for(name, max_num_seqs=16)
    assert [(step.rows, step.tokens_per_row) for step in plan.prediction.steps][:3] == [(1, 1), (8, 1), (16, 1)]
    prompt = plan.prediction.steps[-1]
    assert (prompt.rows, prompt.context) == (1, 0)
    assert prompt.tokens_per_row > 1
    for step in plan.prediction.steps:
        assert step.seconds == pytest.approx(sum(step.parts.values()))
        assert all(seconds >= 0 for seconds in step.parts.values())


def test_weights_of_8_bits_take_their_own_rate() -> None:
    slow = made_rates()
    of_int8 = tuple(
        replace(each, bytes_per_second=each.bytes_per_second / 10) if each.storage == "int8" else each
        for each in slow.rates
    )
    plain, small = (
        plan_for("qwen3", cpu(replace(slow, rates=of_int8)), quantization=quantization).prediction.steps[0]
        for quantization in ("none", "int8")
    )
    assert small.parts["linear"] > plain.parts["linear"]


def test_a_plan_and_its_prediction_come_back_from_json(tmp_path: Path) -> None:
    plan = plan_for()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert plan.prediction.steps
    assert plan.prediction.rates is not None
    assert plan.device.rates == ()


@pytest.mark.parametrize(
    ("device", "settings", "said"),
    [
        (cpu(), {}, "--measure"),
        (cpu(made_rates(threads=5)), {}, "float32 with 5 threads, and this is float32 with 2"),
        (cpu(made_rates(dtype="bfloat16")), {}, "bfloat16 with 2 threads"),
        (cpu(made_rates()), {"kernels": "reference"}, "native kernels"),
        (cpu(made_rates()), {"deterministic": True}, "deterministic"),
        (replace(CATALOGUE["l4-24gb"], bandwidth=None), {}, "neither measured nor published"),
    ],
)
def test_a_plan_says_why_it_predicts_nothing(device: DeviceSpec, settings: dict[str, Any], said: str) -> None:
    plan = plan_for(device=device, **settings)
    prediction = plan.prediction
    assert prediction.steps == ()
    assert prediction.reason.startswith("not predicted: ")
    assert said in prediction.reason
    measuring_helps = HOW_TO_MEASURE in prediction.reason
    assert summary_line(plan).endswith("--measure predicts its speed" if measuring_helps else "speed not predicted")


@pytest.mark.parametrize(
    ("name", "kernels"),
    [("qwen3_5_text", ("delta_scan", "delta_update")), ("mamba", ("selective_scan", "selective_update"))],
)
def test_a_model_with_a_kernel_whose_speed_was_not_measured_is_not_predicted(name: str, kernels: Sequence[str]) -> None:
    """Rates of an earlier version lack the kernels that it did not have."""
    plan = plan_for(name)
    reason = f"not predicted: what was measured lacks {' and '.join(kernels)}; {HOW_TO_MEASURE}"
    assert (plan.prediction.reason, plan.prediction.steps, plan.prediction.rates) == (reason, (), None)
    spec = load_spec(EngineConfig(model=str(checkpoint(name)), dtype="float32"))
    assert make_machine(spec, cpu(), made_rates(), "float32", "float32", "float32") is None


def test_a_model_with_a_kernel_that_is_never_measured_is_not_sent_to_measure_it() -> None:
    for device in (cpu(), cpu(made_rates())):
        plan = plan_for("qwen4_exp_text", device=device)
        said = "not predicted: the speed of dilated_conv1d and indexed_attention and ngram_ids is not measured"
        assert plan.prediction.reason == said
        assert summary_line(plan).endswith("speed not predicted")


def test_a_gpu_of_the_catalogue_has_a_lower_bound() -> None:
    prediction = plan_for(device=CATALOGUE["h100-80gb"]).prediction
    assert prediction.is_lower_bound
    assert "at least" in prediction.reason
    assert ENGINE not in prediction.steps[0].parts


def test_the_plan_shows_milliseconds_tokens_and_the_largest_share() -> None:
    text = shown(plan_for())
    assert "1 row, context" in text
    assert "tokens/s" in text
    assert "measured on 2026-11-22 21:00 UTC: a processor, 2 threads" in text


def test_the_plan_says_where_other_work_took_part_of_the_processors() -> None:
    assert "other work" not in shown(plan_for())
    busy = cpu(replace(made_rates(), other_load=0.5))
    assert "other work took 50% of the processors meanwhile" in shown(plan_for(device=busy))


def shown(plan: Plan) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        print_plan(plan, console)
    return capture.get()


def test_rates_are_kept_by_processor_threads_and_dtype(tmp_path: Path) -> None:
    first, others = made_rates(), [made_rates(threads=4), made_rates("bfloat16")]
    for each in (first, *others):
        save_rates(each, tmp_path)
    elsewhere = replace(first, processor="another processor")
    save_rates(elsewhere, tmp_path)
    newer = replace(first, measured="2026-11-23 09:00 UTC")
    save_rates(newer, tmp_path)
    (tmp_path / "rates-broken.json").write_text("{")
    assert set(kept_rates("a processor", tmp_path)) == {newer, *others}
    assert kept_rates("another processor", tmp_path) == (elsewhere,)
    assert kept_rates("a processor", tmp_path / "nowhere") == ()


def test_rates_lie_where_the_user_keeps_caches(tmp_path: Path) -> None:
    assert cache_directory({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "ostinato"
    assert cache_directory({}) == Path.home() / ".cache" / "ostinato"


def test_a_processor_is_named_by_family_and_model(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    lines = ["processor : 0", "cpu family : 25", "model : 17", "model name : AMD EPYC", "", "processor : 1"]
    (tmp_path / "proc" / "cpuinfo").write_text("\n".join(lines))
    assert processor_of(tmp_path) == "AMD EPYC (family 25, model 17)"
    assert processor_of(tmp_path / "nowhere").startswith("CPU")


def test_kernels_are_other_kernels_when_their_file_changes(tmp_path: Path) -> None:
    from importlib.machinery import EXTENSION_SUFFIXES

    path = tmp_path / f"_native_x{EXTENSION_SUFFIXES[0]}"
    path.write_bytes(b"one")
    one = kernels_of("x", tmp_path)
    path.write_bytes(b"other")
    assert one.startswith("x ")
    assert kernels_of("x", tmp_path) != one


def test_rates_of_other_kernels_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ostinato.plan.device.detect.detect_native", lambda root: NativeFacts("x86_64_v3", "a test"))
    monkeypatch.setattr("ostinato.plan.device.detect.kernels_of", lambda isa: f"{isa} now")
    environ = {"XDG_CACHE_HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    old = replace(made_rates(), processor=processor_of(), kernels="x86_64_v3 before")
    save_rates(old, cache_directory(environ))
    assert detect("cpu", environ=environ).rates == ()
    now = replace(old, kernels="x86_64_v3 now", dtype="bfloat16")
    save_rates(now, cache_directory(environ))
    assert detect("cpu", environ=environ).rates == (now,)
