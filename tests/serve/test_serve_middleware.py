import http.client
import json
import socket

import httpx2
import pytest

from ostinato.errors import ConfigError
from ostinato.serve.http import middleware
from ostinato.serve.http.addresses import split_host_port
from ostinato.serve.http.api_errors import ApiError
from ostinato.serve.http.api_key_file import ApiKey
from ostinato.serve.http.middleware import reject_foreign_host
from ostinato.serve.settings import ServeSettings
from tests.support.patience import PATIENCE
from tests.support.serving import serving

KEYS = ("first-key", "second-key")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("\nfrom-a-file\n")
    with serving(
        {"api_key": KEYS, "api_key_file": path, "max_body": 65536, "cors_origin": ("http://page.example",)},
        max_num_seqs=2,
        graph_mode="none",
    ) as served:
        yield served


@pytest.fixture(scope="module")
def private():
    with serving(max_num_seqs=2, graph_mode="none") as served:
        yield served


def complete(served, headers=None, **more):
    body = {"prompt": "2 + 2 =", "max_tokens": 2, "temperature": 0, **more}
    return httpx2.post(f"{served.url}/v1/completions", json=body, headers=headers, timeout=PATIENCE)


@pytest.mark.parametrize("key", [*KEYS, "from-a-file"])
def test_every_key_opens(guarded, key):
    assert complete(guarded, {"Authorization": f"Bearer {key}"}).status_code == 200


@pytest.mark.parametrize("given", [None, "first-key", "Bearer", "Bearer first-ke", "Basic first-key", "Bearer \xe9"])
def test_without_a_key_nothing_is_told(guarded, given):
    headers = {} if given is None else {"Authorization": given.encode("latin-1")}
    for path in ("/v1/models", "/plan", "/live", "/about", "/prefixes", "/openapi.json", "/nothing"):
        response = httpx2.get(f"{guarded.url}{path}", headers=headers, timeout=PATIENCE)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
    assert complete(guarded, headers).json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("path", ["/", "/health", "/version", "/metrics"])
def test_what_is_open_needs_no_key(guarded, path):
    assert httpx2.get(f"{guarded.url}{path}", timeout=PATIENCE).status_code == 200


def test_every_answer_has_an_id_of_its_own(guarded):
    ids = {
        httpx2.get(f"{guarded.url}{path}", timeout=PATIENCE).headers["x-request-id"]
        for path in ("/health", "/nothing", "/v1/models")
    }
    assert len(ids) == 3


def test_a_preflight_passes_without_a_key_and_other_origins_are_not_allowed(guarded):
    def preflight(origin):
        headers = {
            "Origin": origin,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
        }
        return httpx2.options(f"{guarded.url}/v1/completions", headers=headers, timeout=PATIENCE)

    allowed = preflight("http://page.example")
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "http://page.example"
    other = preflight("http://other.example")
    assert (other.status_code, other.json()["error"]["code"]) == (400, "cors_origin")
    assert "--cors-origin has http://page.example, for GET and POST" in other.json()["error"]["message"]
    assert "origin" in other.headers["vary"].lower()
    assert "access-control-allow-origin" not in other.headers
    refused = complete(guarded, {"Origin": "http://page.example"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "http://page.example"


def test_without_cors_no_origin_is_allowed(private):
    response = complete(private, {"Origin": "http://page.example"})
    assert response.status_code == 200
    assert "access-control-allow-origin" not in response.headers


def test_a_private_server_answers_to_names_of_its_machine_alone(private):
    def status(host):
        return httpx2.get(f"{private.url}/v1/models", headers={"Host": host}, timeout=PATIENCE).status_code

    assert [status(host) for host in ("localhost:8000", "127.0.0.1", "[::1]:80", "LOCALHOST")] == [200] * 4
    assert [status(host) for host in ("evil.example:8000", "localhost.evil.example", "10.0.0.1", "[::2]")] == [421] * 4


def test_a_guarded_server_answers_to_any_name(guarded):
    assert complete(guarded, {"Host": "a.example", "Authorization": "Bearer first-key"}).status_code == 200


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("name", "name", ""),
        ("name:80", "name", "80"),
        ("10.0.0.1:80", "10.0.0.1", "80"),
        ("::1", "::1", ""),
        ("[::1]", "::1", ""),
        ("[::1]:80", "::1", "80"),
        ("[fe80::1%eth0]:80", "fe80::1%eth0", "80"),
        (":80", "", "80"),
        ("", "", ""),
    ],
)
def test_a_host_is_split_from_its_port(text, host, port):
    assert split_host_port(text) == (host, port)


def test_hosts_that_are_strange_are_refused():
    for host in ("localhost@x", "localhost:80:x", "127.0.0.1.example", "0.0.0.0", "user:pass@localhost"):
        with pytest.raises(ApiError):
            reject_foreign_host(host)
    reject_foreign_host(None)


def test_a_body_that_is_too_large_is_refused_whether_its_size_is_declared_or_not(guarded):
    headers = {"Authorization": "Bearer first-key", "Content-Type": "application/json"}
    url = f"{guarded.url}/v1/completions"
    declared = httpx2.post(url, content=b" " * 70000, headers=headers, timeout=PATIENCE)
    chunked = httpx2.post(url, content=iter([b" " * 40000] * 2), headers=headers, timeout=PATIENCE)
    for response in (declared, chunked):
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "body_too_large"


def raw(served, data, *, half=False, read=True):
    """What the server answers to bytes on a connection of their own."""
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
        connection.sendall(data)
        if half:
            return b""
        response = http.client.HTTPResponse(connection)
        response.begin()
        return response.status, response.read() if read else b""


def posted(body, length=None, path="/v1/completions"):
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body


ASSISTANT = b'{"messages": [{"role": "assistant", "tool_calls": [{"function": %s}]}]}'
TOOL = b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": %s}]}'


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (
            "/v1/chat/completions",
            ASSISTANT % b'{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}',
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            "/v1/chat/completions",
            ASSISTANT % b'{"name": "f", "arguments": {"a": ["\\udfff"]}}',
            "messages[0].tool_calls[0].function.arguments.a[0]",
        ),
        (
            "/v1/chat/completions",
            TOOL % b'{"name": "f", "parameters": {"properties": {"a": {"const": "\\ud800"}}}}',
            "tools[0].function.parameters.properties.a.const",
        ),
        ("/v1/chat/completions", TOOL % b'{"name": "f", "parameters": {"properties": {"\\uD800": {}}}}', None),
        ("/v1/responses", b'{"input": [{"type": "function_call", "arguments": "\\ud800"}]}', "input[0].arguments"),
        ("/v1/messages", b'{"messages": [{"role": "user", "content": "\\ud83d\\ude00 \\ud83d"}]}', None),
        ("/tokenize", b'{"prompt": "\\ud800"}', "prompt"),
    ],
)
def test_half_of_a_surrogate_pair_is_refused_wherever_it_stands(private, path, body, param):
    status, text = raw(private, posted(body, path=path))
    assert status == 400, text
    assert b"Unicode" in text
    assert param is None or json.loads(text)["error"]["param"] == param


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"prompt": "x"',
        b"[]",
        b"null",
        b"NaN",
        b'"x"',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"\\ud800": 1, "prompt": "x"}',
        b'{"prompt": "x", "seed": ' + b"1" * 5000 + b"}",
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "timeout": NaN}',
        b'{"prompt": "x", "logit_bias": {"5": Infinity}}',
        b'{"prompt": "x", "cache_salt": "\\udfff"}',
        b'{"prompt": "x", "model": "\\udfff"}',
        b'{"prompt": "x", "stop": ["\\udfff"], "max_tokens": -1}',
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
        '{"prompt": "x", "Ģ": 1}'.encode("utf-16"),
        '{"prompt": "x"}'.encode("utf-16-le"),
        '{"prompt": "x"}'.encode("utf-32"),
    ],
    ids=lambda body: body[:24].decode("latin-1"),
)
def test_bodies_that_are_wrong_are_refused_in_the_form_of_an_error(private, body):
    status, text = raw(private, posted(body))
    assert status in (400, 404), text
    error = json.loads(text)["error"]
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    assert "Traceback" not in error["message"]
    assert "sys." not in error["message"]


def test_a_body_that_is_cut_off_leaves_nothing_and_the_server_goes_on(private):
    raw(private, posted(b'{"prompt": "x", ', length=1000), half=True)
    raw(
        private,
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
        half=True,
    )
    assert complete(private).status_code == 200
    private.until(lambda: private.engine.num_unfinished == 0)


def test_a_body_that_does_not_come_is_not_waited_for_for_ever(private, monkeypatch):
    monkeypatch.setattr(middleware, "BODY_SECONDS", 0.1)
    status, text = raw(private, posted(b"{", length=1000))
    assert status == 408
    assert json.loads(text)["error"]["code"] == "body_timeout"


def test_what_is_not_http_is_refused(private):
    status, _ = raw(private, b"nonsense\r\n\r\n")
    assert status == 400


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"host": "0.0.0.0"}, "insecure"),
        ({"api_key": ("",)}, "api_key"),
        ({"api_key": ("schlüssel",)}, "ASCII"),
        ({"api_key_file": "/nowhere/keys"}, "api_key_file"),
        ({"api_key": "only-text"}, "should be a list"),
        ({"port": 70000}, "65535"),
        ({"otlp_endpoint": "nonsense"}, "http://localhost:4318"),
        ({"otlp_endpoint": "http://"}, "http://localhost:4318"),
        ({"otlp_endpoint": "ftp://collector"}, "http://localhost:4318"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, told):
    with pytest.raises(ConfigError, match=told) as caught:
        ServeSettings(**settings)
    assert "schlüssel" not in str(caught.value)
    assert "only-text" not in str(caught.value)


@pytest.mark.slow
def test_settings_that_make_other_addresses_safe():
    assert ServeSettings(host="0.0.0.0", api_key=("k",)).keys == {"api_key-1": ApiKey("k")}
    assert ServeSettings(host="0.0.0.0", insecure=True).keys == {}
    assert "secret" not in repr(ServeSettings(api_key=("secret",)))
