"""`ostinato serve` as it is deployed: over TLS, on a Unix socket, under a path, with its access log, and its secrets
kept from the processes that it starts."""

import json
import os
import shutil
import signal
import socket
import ssl
import stat
from pathlib import Path

import httpx2
import pytest

from ostinato.config import EngineConfig
from ostinato.errors import ConfigError
from ostinato.serve.app import make_app
from ostinato.serve.http.addresses import TrustedProxies
from ostinato.serve.http.lifecycle import Lifecycle
from ostinato.serve.http.listener import listening
from ostinato.serve.settings import ServeSettings
from tests.support.authority import lock, make_certificate, needs_openssl
from tests.support.patience import PATIENCE
from tests.support.server_process import Process

KEY, PASSWORD, PROMPT = "key-of-the-environment", "password-of-the-key", "a prompt that nobody should read"
FIELDS = {"time", "level", "logger", "request_id", "method", "path", "status", "client", "bytes", "total_seconds"}


@pytest.fixture
def start():
    started = []

    def begin(*flags, **environment):
        started.append(Process(*flags, **environment))
        return started[-1]

    yield begin
    for each in started:
        each.process.kill()
        each.process.wait()


def accesses(server):
    entries = [json.loads(line) for line in server.lines if line.startswith("{")]
    return [entry for entry in entries if entry["path"] != "/health"]


@needs_openssl
@pytest.mark.slow
def test_a_server_with_tls_under_a_path_logs_who_asked_and_keeps_its_secrets_to_itself(start, tmp_path):
    certfile, keyfile = make_certificate(tmp_path)
    secrets = {"OSTINATO_API_KEY": KEY, "OSTINATO_SSL_KEYFILE_PASSWORD": PASSWORD}
    tls = ["--ssl-certfile", str(certfile), "--ssl-keyfile", str(lock(keyfile, PASSWORD))]
    server = start(*tls, "--root-path", "/llm", "--access-log", "json", "--trusted-proxy", "127.0.0.1", **secrets)
    with httpx2.Client(verify=ssl.create_default_context(cafile=str(certfile)), timeout=PATIENCE) as client:
        url = server.ready(client.get)
        assert url.startswith("https://127.0.0.1:")
        client.headers["Authorization"] = f"Bearer {KEY}"
        body = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
        at_root = client.post(f"{url}/v1/completions", json=body)
        below = client.post(f"{url}/llm/v1/completions", json=body)
        assert at_root.json()["choices"] == below.json()["choices"]
        proxied = {"X-Forwarded-For": "6.6.6.6, 192.0.2.7"}
        streamed = client.post(f"{url}/llm/v1/completions", json={**body, "stream": True}, headers=proxied)
        assert streamed.text.endswith("data: [DONE]\n\n")
        headers, padding = {"Content-Type": "application/json"}, b" " * 2**16  # so that a worker reads it
        large = client.post(
            f"{url}/llm/tokenize", content=json.dumps({"prompt": PROMPT}).encode() + padding, headers=headers
        )
        assert large.status_code == 200
        assert client.get(f"{url}/llm/v1/models", headers={"Authorization": "Bearer x"}).status_code == 401
        server.until(lambda: len(accesses(server)) == 5)

        children = server.descendants()
        assert len(children) >= 3  # the engine, the process that workers are forked from, and a worker
        for pid in children:
            environment = Path(f"/proc/{pid}/environ").read_text()
            assert "PYTHONPATH" in environment
            for secret in (KEY, PASSWORD, *secrets):
                assert secret not in environment

        make_certificate(tmp_path, "newer")
        for name in ("pem", "key"):
            shutil.copy(tmp_path / f"newer.{name}", tmp_path / f"server.{name}")
        lock(keyfile, PASSWORD)
        server.process.send_signal(signal.SIGHUP)
        server.until(lambda: any("ssl_certfile was read again" in line for line in server.lines))
    trusted = ssl.create_default_context(cafile=str(certfile))
    port = int(url.rpartition(":")[2])
    with trusted.wrap_socket(socket.create_connection(("127.0.0.1", port)), server_hostname="localhost") as connection:
        assert connection.version() in ("TLSv1.2", "TLSv1.3")
        [[(_, name)]] = connection.getpeercert()["subject"]
        assert name == "newer"
    server.process.send_signal(signal.SIGTERM)
    assert server.status() == 0

    of_root, of_below, of_stream, of_large, refused = accesses(server)
    assert FIELDS | {"key", "prompt_tokens", "finish"} <= of_below.keys()
    assert of_below["path"] == of_root["path"] == "/v1/completions"
    assert (of_below["client"], of_below["status"], of_below["key"]) == ("127.0.0.1", 200, "api_key-1")
    assert of_below["bytes"] == len(below.content)
    assert of_below["request_id"] == below.headers["x-request-id"]
    assert of_stream["bytes"] == len(streamed.content)
    assert of_stream["client"] == "192.0.2.7"
    assert of_large["bytes"] == len(large.content)
    assert (refused["status"], "key" in refused) == (401, False)
    log = "".join(server.lines)
    assert "demo is ready" in log
    assert not any("demo is ready" in line and line.startswith("{") for line in server.lines)
    for secret in (KEY, PASSWORD, PROMPT):
        assert secret not in log


@pytest.mark.slow
def test_a_unix_socket_serves_its_user_and_group_and_goes_with_the_server(start, tmp_path):
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))  # its file stays
    server = start("--uds", str(path), "--access-log", "none", port=None)
    with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(path)), timeout=PATIENCE) as client:
        server.ready(lambda _, **more: client.get("http://any.name/health", **more))
        assert server.url == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        answer = client.post("http://any.name/v1/completions", json={"prompt": [5], "max_tokens": 1})
        assert answer.status_code == 200
        with pytest.raises(ConfigError, match=r"listens on .* already"), listening(ServeSettings(uds=path)):
            pass
        assert client.get("http://any.name/version").status_code == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.status() == 0
    assert not path.exists()
    assert not any("/v1/completions" in line for line in server.lines)
    assert any("demo is ready" in line for line in server.lines)


def test_the_file_of_a_unix_socket_is_removed_only_if_it_is_the_servers_own(tmp_path):
    path = tmp_path / "socket"
    with listening(ServeSettings(uds=path, uds_mode="600")):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        path.unlink()
        path.write_text("another's")
    assert path.read_text() == "another's"
    with pytest.raises(ConfigError, match="no socket"), listening(ServeSettings(uds=path)):
        pass
    assert path.read_text() == "another's"
    path.unlink()
    os.symlink(tmp_path / "nowhere", path)
    with pytest.raises(ConfigError, match="no socket"), listening(ServeSettings(uds=path)):
        pass


@pytest.mark.parametrize("path", ["/nowhere/socket", "/tmp/" + "x" * 200])
def test_a_unix_socket_that_cannot_be_made_says_why(path):
    with pytest.raises(ConfigError, match=r"uds should be a path|uds .* cannot"), listening(ServeSettings(uds=path)):
        pass


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"uds": "/tmp/s", "port": 80}, "uds or on host and port"),
        ({"uds_mode": "600"}, "give uds too"),
        ({"uds": "/tmp/s", "uds_mode": "rw"}, "three digits from 0 to 7, as chmod has them"),
        ({"ssl_keyfile": "/tmp/key"}, "need an ssl_certfile"),
        ({"root_path": "llm"}, "root_path = 'llm': it should be a path that begins with / .*, such as /llm"),
        ({"root_path": "/llm/"}, "root_path"),
        ({"root_path": "/a?b"}, "root_path"),
        ({"access_log": "xml"}, "access_log"),
        ({"trusted_proxy": ("nobody",)}, "trusted_proxy"),
        ({"metrics_prefix": "a b"}, "letters, digits, _ and :"),
        ({"served_model_name": ""}, "at least 1 character"),
        ({"cors_origin": ("https://example.org", "example.org")}, "'example.org' is no origin"),
        ({"cors_origin": ("https://example.org/path",)}, "such as https://example.org, without a path, nor is it"),
        ({"cors_origin": ("",)}, "'' is no origin"),
    ],
)
def test_settings_that_contradict_each_other_or_cannot_be_are_refused(settings, told):
    with pytest.raises(ConfigError, match=told):
        ServeSettings(**settings)


@pytest.mark.parametrize(
    ("peer", "header", "client"),
    [
        ("10.0.0.1", "1.2.3.4", "1.2.3.4"),
        ("10.0.0.1", "6.6.6.6, 1.2.3.4, 10.0.0.9", "1.2.3.4"),
        ("10.0.0.1", "10.0.0.5, 10.0.0.9", "10.0.0.5"),
        ("10.0.0.1", "1.2.3.4:567", "1.2.3.4"),
        ("10.0.0.1", "[2001:db8::1]:443", "2001:db8::1"),
        ("10.0.0.1", "2001:db8::1", "2001:db8::1"),
        ("10.0.0.1", "1.2.3.4, nonsense", "10.0.0.1"),
        ("10.0.0.1", "", "10.0.0.1"),
        ("::ffff:10.0.0.1", "1.2.3.4", "1.2.3.4"),
        ("9.9.9.9", "1.2.3.4", "9.9.9.9"),
        (None, "1.2.3.4", "1.2.3.4"),
        (None, "", None),
    ],
)
def test_a_client_is_whom_a_trusted_proxy_names_and_nobody_elses_word_counts(peer, header, client):
    proxies = TrustedProxies(["10.0.0.0/8", "unix"])
    headers = [(b"x-forwarded-for", each.encode()) for each in header.split(", ")]
    assert proxies.client(peer, headers) == client
    assert TrustedProxies(["192.168.0.0/16"]).client(peer, headers) == peer


@pytest.mark.parametrize("path", ["/v1", "/live", "/health", "/page", "/v1/chat"])
def test_a_path_where_endpoints_are_anyway_is_no_root(path):
    with pytest.raises(ConfigError, match="choose another"):
        make_app(Lifecycle(EngineConfig(model="demo"), ServeSettings(root_path=path)))
    make_app(Lifecycle(EngineConfig(model="demo"), ServeSettings(root_path=f"/llm{path}")))


def test_a_unix_socket_needs_no_key_and_a_password_is_not_shown():
    settings = ServeSettings(uds="/tmp/s")
    assert settings.is_local
    assert settings.client_share(4) is None
    assert "hidden" not in repr(ServeSettings(ssl_certfile="/tmp/c", ssl_keyfile_password="hidden"))
    with pytest.raises(ConfigError) as raised:
        ServeSettings(ssl_certfile="/tmp/c", ssl_keyfile_password=("hidden",))
    assert "hidden" not in raised.value.message
