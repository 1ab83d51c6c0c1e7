"""Answers of HTTP, counted by endpoint, method and status."""

import contextlib
import json
import socket

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ostinato.config import EngineConfig
from ostinato.observe.request_record import ResponseCounts
from ostinato.serve.app import make_api
from ostinato.serve.http.lifecycle import Lifecycle
from ostinato.serve.settings import ServeSettings
from tests.support.patience import PATIENCE
from tests.support.serving import serving

KEY = {"Authorization": "Bearer k"}
SHORT = {"prompt": [5, 6, 7], "max_tokens": 2, "temperature": 0}


@pytest.fixture(scope="module")
def served():
    with serving({"api_key": ("k",)}, max_num_seqs=2, graph_mode="none", max_model_len=512) as served:
        yield served


def counted(served):
    """Of each (handler, method, status, code), by the server's own page of metrics."""
    text = httpx2.get(f"{served.url}/metrics", timeout=PATIENCE).text
    return {
        tuple(sample.labels[name] for name in ("handler", "method", "status", "code")): sample.value
        for family in text_string_to_metric_families(text)
        if family.name == "http_requests"
        for sample in family.samples
    }


@contextlib.contextmanager
def gains(served, expected):
    """What was counted since, once it is as much as expected; the reading of metrics itself aside."""
    before = counted(served)

    def gained():
        now = {key: value - before.get(key, 0) for key, value in counted(served).items()}
        return {key: value for key, value in now.items() if value and key[0] != "/metrics"}

    yield
    served.until(lambda: sum(gained().values()) >= sum(expected.values()))
    assert gained() == expected


def test_every_answer_is_counted_once_under_its_endpoint_and_status(served):
    expected = {
        ("/v1/completions", "POST", "2xx", "200"): 3,
        ("/v1/completions", "POST", "4xx", "400"): 1,
        ("/v1/chat/completions", "POST", "4xx", "401"): 1,
        ("/v1/chat/completions", "GET", "4xx", "405"): 1,
        ("/v1/models/{name}", "GET", "2xx", "200"): 1,
        ("/v1/models/{name}", "GET", "4xx", "404"): 1,
        ("/page", "GET", "2xx", "200"): 1,
        ("/health", "GET", "2xx", "200"): 1,
    }
    with gains(served, expected):
        url = served.url
        for more in ({}, {"stream": True}, {"n": 2}, {"foo": 1}):
            httpx2.post(f"{url}/v1/completions", json={**SHORT, **more}, headers=KEY, timeout=PATIENCE)
        httpx2.post(f"{url}/v1/chat/completions", json={}, timeout=PATIENCE)
        httpx2.get(f"{url}/v1/chat/completions", headers=KEY, timeout=PATIENCE)
        httpx2.get(f"{url}/v1/models/demo", headers=KEY, timeout=PATIENCE)
        httpx2.get(f"{url}/v1/models/none/such", headers=KEY, timeout=PATIENCE)
        httpx2.get(f"{url}/page/main.js", timeout=PATIENCE)
        httpx2.get(f"{url}/health", timeout=PATIENCE)


def test_a_client_that_leaves_is_counted_as_such(served):
    expected = {("/v1/completions", "POST", "4xx", "499"): 1}
    with gains(served, expected):
        host, port = served.url.removeprefix("http://").split(":")
        served.probe.delay = 0.05
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
            data = json.dumps({**SHORT, "max_tokens": 400, "ignore_eos": True, "stream": True})
            head = f"Authorization: Bearer k\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
            connection.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n{data}".encode())
            connection.recv(100)
        served.until(lambda: served.engine.num_unfinished == 0)
        served.probe.reset()


def test_paths_and_methods_that_are_not_served_make_one_label():
    counts = ResponseCounts()
    counts.paths.add("/")
    counts.families["/v1/models/"] = "/v1/models/{name}"
    for number in range(100):
        counts.count(f"M{number}", f"/nothing/{number}", 404)
        counts.count("GET", f"/v1/models/{number}", 404)
    counts.count("GET", "/", None)
    assert [(row["handler"], row["method"], count) for row, count in counts.rows()] == [
        ("/v1/models/{name}", "GET", 100),
        ("none", "none", 100),
    ]


def test_every_endpoint_has_its_name():
    counts = ResponseCounts()
    document = make_api(Lifecycle(EngineConfig(model="demo"), ServeSettings()), counts).app.openapi()
    served = {path.replace(":path", "") for path in document["paths"]} | {"/", "/page", "/docs", "/openapi.json"}
    assert served == counts.paths | set(counts.families.values())
