"""An engine that does not come back from a step: the server says so, and goes on answering."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from ostinato.engine.process.pending_calls import Heartbeat
from tests.support.patience import PATIENCE
from tests.support.serving import events, serving

ASKED = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True}


def get(served, path):
    return httpx2.get(f"{served.url}{path}", timeout=PATIENCE)


def post(served):
    return httpx2.post(f"{served.url}/v1/completions", json=ASKED, timeout=PATIENCE)


def streamed(served):
    url = f"{served.url}/v1/completions"
    with httpx2.stream("POST", url, json={**ASKED, "max_tokens": 200, "stream": True}, timeout=PATIENCE) as response:
        return events(response)


def samples(served):
    lines = get(served, "/metrics").text.splitlines()
    return {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}


@pytest.fixture(scope="module")
def served():
    with serving({"engine_timeout": PATIENCE}, graph_mode="none", max_model_len=256) as served:
        yield served


def watch_for_a_second(served):
    """The engine stalls after a second from now on. Before its step was held, a busy machine would be a stall, too."""
    engine = served.engine

    async def begin():
        before = engine._heartbeat
        assert before._timeout == PATIENCE
        before.stop()
        engine._heartbeat = Heartbeat(engine.observe, 1, before._on_change)
        engine._heartbeat.record(before.last)

    served.on_loop(begin())


def test_a_stalled_engine_is_not_healthy_until_it_goes_on(served, caplog):
    served.until(lambda: get(served, "/health").json() == get(served, "/health/live").json() == {"status": "ready"})
    with caplog.at_level("WARNING", "ostinato.serve"), ThreadPoolExecutor() as pool:
        served.probe.hold()
        running = pool.submit(post, served)
        served.unfinished(1)
        watch_for_a_second(served)
        try:
            served.until(lambda: served.lifecycle.status == "stalled")
            for path in ("/health", "/health/live"):
                answer = get(served, path)
                assert (answer.status_code, answer.json()) == (503, {"status": "stalled"})
            refused = post(served)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "engine_stalled"
            assert get(served, "/prefixes").json()["error"]["code"] == "engine_stalled"
            # What the front knows is still told.
            seen = get(served, "/live").json()
            assert seen["status"] == "stalled"
            assert seen["stats"]["steps"] > 0
            assert seen["heartbeat_age"] >= 1
            assert samples(served)["ostinato:engine_heartbeat_age_seconds"] >= 1
        finally:
            served.probe.go()
        assert running.result().json()["usage"]["completion_tokens"] == 4
        served.until(lambda: served.lifecycle.status == "ready")
    assert f"no sign of life for {PATIENCE} s" in caplog.text
    assert "goes on" in caplog.text
    served.until(lambda: get(served, "/health").status_code == 200)
    served.until(lambda: post(served).status_code == 200)


@pytest.mark.slow
def test_a_server_can_exit_so_that_a_supervisor_restarts_it():
    with serving({"engine_timeout": PATIENCE, "on_stall": "exit"}, graph_mode="none", max_model_len=256) as served:
        served.server.config.timeout_graceful_shutdown = 1  # what is unanswered then is cut off, as by `serve`
        served.probe.delay = 0.05
        with ThreadPoolExecutor() as pool:
            readers = [pool.submit(streamed, served) for _ in range(4)]
            served.until(lambda: served.stats()["running"] == 4)
            served.probe.hold_next()
            watch_for_a_second(served)
            served.until(lambda: served.server.should_exit)
            for reader in readers:
                *_, error, end = reader.result()
                assert (json.loads(error)["error"]["code"], end) == ("engine_failed", "[DONE]")
        assert served.lifecycle.status == "failed"
        assert served.lifecycle.exit_status() == 1
        assert "no sign of life" in str(served.lifecycle.error)
