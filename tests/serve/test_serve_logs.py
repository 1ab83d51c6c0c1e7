import io
import json
import logging
import subprocess
import sys

import httpx2
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from ostinato.observe.logs import logs_to
from ostinato.observe.tracing import Tracing
from ostinato.serve.app import make_app
from tests.support import serving as tests_serving
from tests.support.engine_probe import SECRET as FAULT
from tests.support.patience import PATIENCE
from tests.support.serving import serving

SECRET = "a prompt that nobody should read"
KEY = "a-key-that-nobody-should-read"
HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def spans():
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def served(spans):
    with pytest.MonkeyPatch.context() as patch:
        tracing = Tracing(spans, "demo", batched=False)
        patch.setattr(tests_serving, "make_app", lambda lifecycle: make_app(lifecycle, tracing))
        with serving({"api_key": (KEY,)}, max_num_seqs=2, graph_mode="none") as served:
            yield served


@pytest.fixture(params=["text", "json"])
def lines(request):
    """The lines of the log so far, as a function."""
    stream = io.StringIO()
    with logs_to(request.param, "info", stream):
        yield lambda: stream.getvalue().splitlines()


def test_loggers_are_as_before_when_nobody_serves_any_more(capsys):
    stream, log, requests = io.StringIO(), logging.getLogger("ostinato.serve"), logging.getLogger("ostinato.requests")
    before = log.getEffectiveLevel()
    for access in (None, "json", "none"):
        with logs_to("text", "info", stream, access=access):
            log.info("heard")
            assert requests.isEnabledFor(logging.INFO) is (access != "none")
    assert stream.getvalue().count("heard") == 3
    stream.close()
    log.error("not heard")
    assert "closed file" not in capsys.readouterr().err
    assert log.getEffectiveLevel() == before
    assert requests.isEnabledFor(logging.ERROR)


def complete(served, headers=None, **more):
    body = {"prompt": SECRET, "max_tokens": 3, "temperature": 0, "ignore_eos": True, **more}
    return httpx2.post(
        f"{served.url}/v1/completions", json=body, headers={**HEADERS, **(headers or {})}, timeout=PATIENCE
    )


def test_a_request_is_one_line_that_says_how_it_went_and_not_what(served, lines):
    response = complete(served)
    usage = response.json()["usage"]
    served.until(lambda: lines())
    [line] = lines()
    assert response.headers["x-request-id"] in line
    assert SECRET not in line
    assert KEY not in line
    if not line.startswith("{"):
        assert f"prompt {usage['prompt_tokens']}" in line
        assert "POST /v1/completions 200" in line
        return
    entry = json.loads(line)
    assert entry["level"] == "info"
    assert entry["status"] == 200
    assert entry["prompt_tokens"] == usage["prompt_tokens"]
    assert entry["completion_tokens"] == 3
    assert entry["finish"] == "length"
    assert 0 <= entry["queue_seconds"] <= entry["first_token_seconds"] <= entry["total_seconds"]


def test_refusals_are_lines_too_and_probes_are_not(served, lines):
    httpx2.get(f"{served.url}/health", timeout=PATIENCE)
    httpx2.get(f"{served.url}/metrics", timeout=PATIENCE)
    httpx2.post(
        f"{served.url}/v1/completions?secret={KEY}", json={}, headers={"Authorization": "Bearer x"}, timeout=PATIENCE
    )
    httpx2.get(f"{served.url}/no%0athing", headers=HEADERS, timeout=PATIENCE)
    served.until(lambda: len(lines()) >= 2)
    refused, unknown = lines()
    assert "401" in refused
    assert KEY not in refused
    assert "404" in unknown
    assert "/no%0athing" in unknown


@pytest.mark.parametrize(
    ("more", "code", "param"),
    [
        ({"max_token": 3}, "unknown_parameter", "max_token"),
        ({"temperature": -1}, None, "temperature"),
        ({"bad\nname": 1}, "unknown_parameter", "bad\\nname"),
        ({"prompt": [5] * 9000}, "context_length_exceeded", "prompt"),
    ],
)
def test_the_line_of_a_refusal_names_its_code_and_the_field(served, lines, more, code, param):
    assert complete(served, **more).status_code == 400
    served.until(lambda: lines())
    [line] = lines()
    if line.startswith("{"):
        entry = json.loads(line)
        assert (entry.get("code"), entry["param"]) == (code, param)
    else:
        assert f"param {param}, " in line
        assert code is None or f"{code}, " in line


def test_the_time_to_the_first_token_is_that_of_the_metrics(served):
    def total():
        text = httpx2.get(f"{served.url}/metrics", timeout=PATIENCE).text
        [line] = [line for line in text.splitlines() if line.startswith("ostinato:time_to_first_token_seconds_sum")]
        return float(line.split()[-1])

    stream = io.StringIO()
    with logs_to("json", "info", stream):
        before = total()
        assert complete(served).status_code == 200
        served.until(lambda: "first_token_seconds" in stream.getvalue())
        entry = json.loads(stream.getvalue().splitlines()[0])
        assert total() - before == pytest.approx(entry["first_token_seconds"], abs=2e-6)


def test_the_error_of_a_step_is_logged_once_and_not_told(served, lines):
    served.probe.fail_rows = -1
    response = complete(served)
    assert response.status_code == 500
    assert FAULT not in response.text
    served.until(lambda: len(lines()) >= 3)
    text = "\n".join(lines())
    assert text.count("Traceback") == 1
    assert FAULT in text
    assert response.headers["x-request-id"] in text


def test_an_error_inside_an_endpoint_is_logged_with_its_place_and_not_told(served, lines, monkeypatch):
    def fail(*_, **__):
        raise ZeroDivisionError("/a/path/of/the/server")

    monkeypatch.setattr(served.engine, "submit", fail)
    response = complete(served)
    assert response.status_code == 500
    assert "/a/path" not in response.text
    told = ("ZeroDivisionError", response.headers["x-request-id"])
    served.until(lambda: all(part in "\n".join(lines()) for part in told))


def test_a_request_is_a_span_with_its_parts_within_the_clients(served, spans):
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"

    def traced():
        return [span for span in spans.get_finished_spans() if f"{span.context.trace_id:032x}" == trace]

    complete(served, {"traceparent": f"00-{trace}-{parent}-01"})
    served.until(lambda: len(traced()) >= 4)
    by_name = {span.name: span for span in traced()}
    assert len(by_name) == len(traced())
    whole = by_name.pop("POST /v1/completions")
    assert f"{whole.parent.span_id:016x}" == parent
    assert whole.attributes["gen_ai.usage.output_tokens"] == 3
    assert list(by_name) == ["queue", "prefill", "decode"]
    moments = [moment for part in by_name.values() for moment in (part.start_time, part.end_time)]
    assert moments == sorted(moments)
    assert whole.start_time <= moments[0]
    assert moments[-1] <= whole.end_time
    assert all(part.parent.span_id == whole.context.span_id for part in by_name.values())
    assert SECRET not in str([dict(span.attributes) for span in spans.get_finished_spans()])


def test_without_opentelemetry_the_setting_names_the_extra():
    code = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from ostinato.observe.tracing import make_tracing\n"
        "from ostinato.errors import ConfigError\n"
        "try: make_tracing('http://localhost:4318', 'demo')\n"
        "except ConfigError as error: print(error)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert "pip install 'ostinato[trace]'" in told.stdout, told.stderr
