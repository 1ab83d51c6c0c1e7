"""Requests that are computed again when the engine is idle: right ones are equal, and wrong ones are found."""

from __future__ import annotations

import logging
import re
from typing import Any

import httpx2
import numpy as np
import pytest

from ostinato.config import EngineConfig
from ostinato.engine.core import EngineCore
from ostinato.errors import ConfigError
from ostinato.observe.metrics import families
from ostinato.sampling.grammar import GrammarCompiler
from ostinato.sampling.guide import Guide
from ostinato.serve.settings import ServeSettings
from ostinato.verify import online_checks
from ostinato.verify.online_checks import OnlineChecks
from tests.support.checkpoints import random_prompt
from tests.support.engines import greedy, make_engine, run, sampled
from tests.support.patience import PATIENCE
from tests.support.serving import serving


def checked(engine: EngineCore, rate: float = 1.0) -> OnlineChecks:
    checks = engine.online_checks = OnlineChecks(engine, rate)
    return checks


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("nemotron_h", {}),
        ("nemotron_h_head", {"speculative": "mtp:2"}),
        ("gemma3_text", {"overlap": "on"}),
        ("qwen3_next", {"kv_cache_dtype": "int8"}),
    ],
)
def test_what_the_fast_paths_gave_is_what_the_plain_path_gives(name: str, settings: dict[str, Any]) -> None:
    engine = make_engine(name, **settings)
    checks = checked(engine)
    for number in range(8):
        params = sampled(seed=number, repetition_penalty=1.2) if number % 2 else greedy(n=1 + number % 3)
        engine.add_request(random_prompt(20 + 5 * number, seed=number // 2), params)
    run(engine)
    while checks.advance():
        engine.scheduler.check_integrity()
    assert (checks.counts.checked, checks.counts.different, checks.counts.failed) == (8, 0, 0)
    run(engine)


def test_a_wrong_token_is_counted_and_logged_with_its_record(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(record=str(tmp_path))
    checks = checked(engine)
    compute, count = engine.runner.model.compute_logits, 0

    def broken(hidden: Any) -> Any:
        nonlocal count
        count += 1
        logits = compute(hidden)
        return np.roll(logits, 1, axis=-1) if count == 4 else logits

    engine.runner.model.compute_logits = broken  # type: ignore[method-assign]
    engine.add_request(random_prompt(20, seed=1), greedy(), request_id="wrong")
    run(engine)
    engine.add_request(random_prompt(20, seed=2), greedy(), request_id="right")
    run(engine)
    with caplog.at_level(logging.ERROR):
        while checks.advance():
            pass
    engine.close()
    assert (checks.counts.checked, checks.counts.different) == (2, 1)
    [line] = caplog.messages
    assert "request wrong: token 3 is" in line
    assert f"ostinato replay {tmp_path}" in line


def test_a_check_waits_while_requests_are_computed_and_then_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(online_checks, "CHUNK", 4)
    engine = make_engine()
    checks = checked(engine)
    engine.add_request(random_prompt(40, seed=1), greedy())
    run(engine)
    assert checks.advance()
    checks.pause()
    engine.add_request(random_prompt(60, seed=2), greedy())
    run(engine)
    while checks.advance():
        pass
    assert (checks.counts.checked, checks.counts.different, checks.counts.interrupted) == (2, 0, 1)


def test_a_part_of_the_requests_is_chosen_and_what_cannot_be_checked_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(online_checks, "MAX_TOKENS", 48)
    monkeypatch.setattr(online_checks, "MAX_WAITING", 1000)
    engine = make_engine()
    some = checked(engine, 0.25)
    for number in range(60):
        engine.add_request(random_prompt(5, seed=number), greedy(max_tokens=1))
    run(engine)
    while some.advance():
        pass
    assert 5 < some.counts.checked < 25
    every = checked(engine)
    engine.add_request(random_prompt(60, seed=1), greedy(), request_id="long")
    engine.add_request(random_prompt(6, seed=1), greedy(), request_id="gone")
    engine.step()
    engine.abort("gone")
    run(engine)
    assert not every.advance()
    assert every.stats() == {
        "checked": 0, "different": 0, "ties": 0, "interrupted": 0, "left_out": 1, "failed": 0
    }  # fmt: skip


def test_guided_and_stopped_outputs_are_checked_and_no_guide_is_compiled_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = EngineCore(EngineConfig(model="demo", threads=1, cache_memory="16MiB"))
    checks = checked(engine)
    engine.add_request("How many?", sampled(ignore_eos=False, guide=Guide(regex="[ab]{5,9}c")))
    engine.add_request("Why?", sampled(ignore_eos=False, min_tokens=4, max_tokens=30))
    run(engine)
    monkeypatch.setattr(GrammarCompiler, "compile", lambda *_: pytest.fail("compiled in the engine's thread"))
    while checks.advance():
        pass
    assert (checks.counts.checked, checks.counts.different, checks.counts.failed) == (2, 0, 0)


def test_an_error_of_a_check_ends_the_checks_alone_and_metrics_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    checks = checked(engine)
    engine.add_request(random_prompt(20, seed=1), greedy())
    run(engine)
    monkeypatch.setattr(OnlineChecks, "_logits", lambda *_: 1 / 0)
    assert checks.advance()
    assert not checks.advance()
    assert checks.counts.failed == 1
    engine.add_request(random_prompt(20, seed=1), greedy())
    assert run(engine)
    checks.counts.ties = 3
    memory = dict.fromkeys(("weights", "activations", "graphs", "cache"), 0)
    metrics = families(engine.stats(), engine.meter, memory, "", {})
    values = {metric.name: [sample.value for sample in metric.samples] for metric in metrics}
    assert (values["verify_failed"], values["verify_ties"]) == ([1], [3])


@pytest.mark.slow
def test_a_server_checks_when_it_is_idle_and_says_so() -> None:
    with serving({"verify_rate": 1.0}, cache_memory="16MiB") as served:
        served.client().completions.create(model="demo", prompt="Leo had 50 cards and lost 8.", max_tokens=8)
        served.until(lambda: served.stats()["verify"]["checked"] == 2)  # the first step of the start is one
        assert served.stats()["verify"]["different"] == 0
        health = f"{served.url}/health"
        served.until(lambda: httpx2.get(health, timeout=PATIENCE).json()["verify"]["checked"] == 2)
        metrics = httpx2.get(f"{served.url}/metrics", timeout=PATIENCE).text
        assert re.search(r"^ostinato:verify_checked_total\S* 2\.0$", metrics, re.MULTILINE)
        assert re.search(r"^ostinato:verify_different_total\S* 0\.0$", metrics, re.MULTILINE)


def test_without_a_rate_nothing_is_said_of_checks() -> None:
    with pytest.raises(ConfigError, match="leave out replicas"):
        ServeSettings(verify_rate=0.1, replicas=2)
    with pytest.raises(ConfigError, match="verify_rate"):
        ServeSettings(verify_rate=1.5)
    assert make_engine().stats()["verify"] is None


def test_the_log_says_which_share_is_checked(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine()
    with caplog.at_level(logging.INFO):
        for rate in (0.7, 0.001):
            checked(engine, rate)
    assert [line.split("%")[0] for line in caplog.messages if "verify_rate" in line] == [
        "verify_rate: 70",
        "verify_rate: 0.1",
    ]


def test_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    monkeypatch.setattr(EngineCore, "has_ranks", True)
    with pytest.raises(ConfigError, match="tensor_parallel_size is above 1"):
        OnlineChecks(engine, 0.5)
