"""`ostinato bench profile --trace`: a trace in Chrome's format that names every operation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ostinato import ConfigError
from ostinato.bench.profile import ProfileBench, check_trace_path, profile, trace_of, write_trace
from ostinato.bench.roofline import measure_bandwidth, measure_flops
from ostinato.cli.main import main
from tests.support.checkpoints import checkpoint

STEPS = {"decode": [("linear", 0.002), ("rms_norm", 0.001)], "prefill": [("linear", 0.5)]}


def test_calls_follow_each_other_on_the_track_of_their_step() -> None:
    events = trace_of(STEPS, "demo")["traceEvents"]
    names = [(event["name"], event["tid"], event["args"]["name"]) for event in events if event["ph"] == "M"]
    assert names == [("process_name", 0, "demo"), ("thread_name", 1, "decode"), ("thread_name", 2, "prefill")]
    calls = [(event["name"], event["tid"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    assert calls == [
        ("linear", 1, 0, pytest.approx(2000)),
        ("rms_norm", 1, pytest.approx(2000), pytest.approx(1000)),
        ("linear", 2, 0, pytest.approx(500_000)),
    ]


def test_a_step_of_an_engine_becomes_a_trace_with_its_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "ostinato.bench.profile.measure_bandwidth", lambda device, isa: measure_bandwidth(device, 2**22, isa)
    )
    monkeypatch.setattr("ostinato.bench.profile.measure_flops", lambda *args: measure_flops(*args, size=64))
    settings = {"threads": 1, "dtype": "float32", "cache_memory": "16MiB", "model": str(checkpoint("llama"))}
    bench = ProfileBench(batch_sizes=(2,), context=8, prefill=16, rounds=1)
    data = profile(settings, bench, lambda _: None, tmp_path / "steps.json").data
    trace = json.loads((tmp_path / "steps.json").read_text())
    for track, step in ((1, data["decode"][0]), (2, data["prefill"])):
        calls = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["tid"] == track]
        assert {event["name"] for event in calls} == {each["kernel"] for each in step["kernels"]}
        assert all(event["dur"] >= 0 and event["ts"] >= 0 and event["pid"] == 1 for event in calls)
        assert len(calls) == sum(each["calls"] for each in step["kernels"])


def test_a_trace_that_could_not_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="directory that exists"):
        check_trace_path(tmp_path / "missing" / "steps.json")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_trace(tmp_path, {})
    monkeypatch.setattr("ostinato.bench.profile.measure_flops", lambda *_: pytest.fail("measured"))
    with pytest.raises(SystemExit) as end:
        main(["bench", "profile", "demo", "--trace", str(tmp_path)])
    assert end.value.code == 2
    assert "--trace" in capsys.readouterr().err
