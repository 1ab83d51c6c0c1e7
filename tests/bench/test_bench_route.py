"""`ostinato bench route`: its figures from plain numbers, and one small run of real servers and routers."""

from __future__ import annotations

import json

import pytest

from ostinato import ConfigError, ModelError, RequestError
from ostinato.bench.serve.load_generator import LoadRun, RequestOutcome
from ostinato.bench.serve.route import (
    LAYOUTS,
    ONE,
    ROUTED,
    TURNS,
    RouteRound,
    round_of,
    route_figures,
    wait_for_backends,
)
from ostinato.cli.main import main
from tests.support.odd_backends import odd_backend, says


def run_of(*outcomes: RequestOutcome) -> LoadRun:
    return LoadRun(list(outcomes), seconds=4.0, not_sent=0, cpu_seconds=0.0, loop_lags=[])


def outcome(prompt: int | None, cached: int | None, error: str | None = None) -> RequestOutcome:
    return RequestOutcome(0, 0.0, 0.0, 1.0, prompt_tokens=prompt, cached_tokens=cached, error=error)


def test_a_round_adds_up_tokens_and_is_refused_if_a_request_failed_or_says_no_tokens() -> None:
    assert round_of(run_of(outcome(10, 0), outcome(30, 20)), (1, 1)) == RouteRound(40, 20, (1, 1))
    with pytest.raises(RequestError, match="http_500"):
        round_of(run_of(outcome(10, 0), outcome(None, None, "http_500")), (1, 1))
    with pytest.raises(RequestError, match="does not say"):
        round_of(run_of(outcome(10, None)), (1,))


def test_servers_that_are_lost_tell_nothing_or_do_not_answer_end_the_wait() -> None:
    def backend(state: str, tells: bool) -> dict[str, object]:
        return {"url": "http://server", "state": state, "reason": "its reason", "kv_events": tells}

    with odd_backend({"/backends": says({"backends": [backend("ready", True)]})}) as router:
        wait_for_backends(router.url, 1)
        router.answers["/backends"] = says({"backends": [backend("down", False)]})
        with pytest.raises(ModelError, match=r"lost a server: http://server is down \(its reason\)"):
            wait_for_backends(router.url, 1)
        router.answers["/backends"] = says({"backends": [backend("ready", False)]})
        with pytest.raises(ModelError, match="what its servers cache after 0 s"):
            wait_for_backends(router.url, 1, ready_within=0.0)
    with pytest.raises(ModelError, match="does not answer"):
        wait_for_backends(router.url, 1)


def test_hit_rates_are_compared_with_that_of_one_server_round_by_round() -> None:
    one, two = RouteRound(100, 80, (4,)), RouteRound(100, 40, (4,))
    rounds = {
        ONE: [one, two],
        ROUTED: [RouteRound(100, 76, (3, 1)), RouteRound(100, 40, (2, 2))],
        TURNS: [RouteRound(100, 40, (2, 2))] * 2,
    }
    results = {each["layout"]: each for each in route_figures(rounds)}
    assert results[ROUTED]["of_one"] == {"median": pytest.approx(0.975), "min": pytest.approx(0.95), "max": 1.0}
    assert results[ROUTED]["sent"] == [5, 3]
    assert (results[TURNS]["prompt_tokens"], results[TURNS]["cached_tokens"]) == (200, 80)
    assert results[TURNS]["hit_rate"]["median"] == pytest.approx(0.4)
    with pytest.raises(ConfigError, match="nothing is cached on one server"):
        route_figures({ONE: [RouteRound(10, 0, (1,))]})


@pytest.mark.slow
def test_the_command_compares_one_server_the_router_and_turns(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--rounds", "1", "--conversations", "4", "--turns", "3", "--concurrency", "1", "--shared-prefix", "64"]
    flags += ["--output-tokens", "4", "--cache-memory", "64MiB", "--threads", "1"]
    with pytest.raises(SystemExit) as end:
        main(["bench", "route", "demo", *flags, "--json"])
    assert not end.value.code
    report = json.loads(capsys.readouterr().out)
    results = {each["layout"]: each for each in report["results"]}
    assert tuple(results) == LAYOUTS
    for each in results.values():  # the same conversations, but for answers that rounding decides
        assert each["prompt_tokens"] == pytest.approx(results[ONE]["prompt_tokens"], rel=0.05)
    assert [sum(each["sent"]) for each in results.values()] == [12] * 3
    assert results[TURNS]["sent"] == [6, 6]
    assert results[ROUTED]["of_one"]["min"] >= 0.9
    assert results[ROUTED]["cached_tokens"] > results[TURNS]["cached_tokens"]
