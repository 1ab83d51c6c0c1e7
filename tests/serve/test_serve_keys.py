"""Keys with names: whose requests are counted and logged, and how they are changed while the server runs."""

from __future__ import annotations

import logging
import os
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from ostinato.errors import ConfigError
from ostinato.serve.http.api_errors import ApiError
from ostinato.serve.http.api_keys import ApiKeys, client_of
from ostinato.serve.settings import ServeSettings
from tests.support.patience import PATIENCE
from tests.support.serving import serving


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "keys"
    path.write_text("team-a key-of-a\n\nkey-alone\n")
    return path


def name_of(keys, key):
    return keys.check(f"Bearer {key}")


def test_each_key_has_a_name_its_own_or_that_of_its_line(file):
    keys = ApiKeys(ServeSettings(api_key=("given",), api_key_file=file))
    assert [name_of(keys, key) for key in ("given", "key-of-a", "key-alone")] == ["api_key-1", "team-a", "line-3"]
    with pytest.raises(ApiError):
        name_of(keys, "team-a")


def test_the_file_is_read_again_and_a_broken_one_changes_nothing(file, caplog):
    keys = ApiKeys(ServeSettings(api_key=("given",), api_key_file=file))
    file.write_text("team-b key-of-b\n")
    keys.reload()
    assert name_of(keys, "key-of-b") == "team-b"
    assert name_of(keys, "given") == "api_key-1"
    with pytest.raises(ApiError):
        name_of(keys, "key-of-a")
    twice = ("same secret\nsame other\n", "a secret\nb secret\n")
    weights = ("a secret weight=0\n", "a secret weight=1.5\n", "a secret weight=\n", "secret weight=²\n")
    for broken in ("a b c secret\n", "", "b/ad secret\n", "sécret\n", *twice, *weights):
        file.write_text(broken)
        with caplog.at_level(logging.ERROR):
            keys.reload()
        assert "the keys stay as they were" in caplog.text
        assert name_of(keys, "key-of-b") == "team-b"
    file.unlink()
    keys.reload()
    assert name_of(keys, "key-of-b") == "team-b"
    assert "secret" not in caplog.text
    assert "sécret" not in caplog.text


def test_a_pipe_is_read_once_and_never_waited_for_by_the_server(file, caplog):
    keys = ApiKeys(ServeSettings(api_key_file=file))
    file.unlink()
    os.mkfifo(file)  # nobody writes to it
    keys.reload()
    assert f"the keys stay as they were: api_key_file {file} is a pipe or a device" in caplog.text
    assert name_of(keys, "key-of-a") == "team-a"


def test_a_broken_file_is_refused_at_the_start_without_telling_its_keys(tmp_path):
    path = tmp_path / "keys"
    path.write_text("one two secret\n")
    with pytest.raises(ConfigError, match="line 1") as caught:
        ServeSettings(api_key_file=path)
    assert "secret" not in caught.value.message


def test_a_line_may_give_its_key_a_weight_and_a_wrong_one_is_told_what_works(file):
    file.write_text("team-a key-of-a weight=4\nkey-alone weight=2\nteam-c key-of-c\n")
    keys = ApiKeys(ServeSettings(api_key=("given",), api_key_file=file))
    assert keys.weights == {"api_key-1": 1, "team-a": 4, "line-2": 2, "team-c": 1}
    assert [name_of(keys, key) for key in ("key-of-a", "key-alone")] == ["team-a", "line-2"]
    file.write_text("team-a key-of-a weight=7\n")
    keys.reload()
    assert keys.weights == {"api_key-1": 1, "team-a": 7}
    file.write_text("team-a secret weight=lots\n")
    with pytest.raises(
        ConfigError, match="line 1: a weight is a whole number from 1 to 1000, such as weight=1"
    ) as caught:
        ServeSettings(api_key_file=file)
    assert "secret" not in caught.value.message


@pytest.mark.slow
def test_a_key_of_weight_two_has_twice_the_share_and_the_metrics_show_it(file):
    file.write_text("heavy key-of-h weight=2 metrics=all\nlight key-of-l\n")
    serve = {"api_key_file": file, "max_waiting": 15, "max_requests_per_client": 3, "max_n": 6}
    with serving(serve, max_num_seqs=1, graph_mode="none") as served:

        def post(key, num_outputs):
            body = {"prompt": "2 + 2 =", "max_tokens": 2, "n": num_outputs}
            headers = {"Authorization": f"Bearer {key}"}
            return httpx2.post(f"{served.url}/v1/completions", json=body, headers=headers, timeout=PATIENCE)

        refused = post("key-of-l", 4)
        assert refused.status_code == 400
        assert "times its key's weight" in refused.json()["error"]["message"]
        served.probe.hold()
        with ThreadPoolExecutor() as pool:
            heavy = pool.submit(post, "key-of-h", 6)
            served.until(lambda: served.engine.queue_limit.num_unfinished == 6)
            assert post("key-of-h", 1).status_code == 429
            served.probe.go()
            assert heavy.result().status_code == 200
        text = metrics(served, "key-of-h")
        weights = [line for line in text.splitlines() if line.startswith("ostinato:key_weight{")]
        assert {'key="heavy"' in line: line.split()[-1] for line in weights} == {True: "2.0", False: "1.0"}


@pytest.mark.slow
def test_the_metrics_tell_of_keys_only_those_who_have_one_and_of_all_where_the_file_says_so(file):
    file.write_text("watcher key-of-w metrics=all weight=3\nteam-a key-of-a\nteam-b key-of-b\n")
    with serving({"api_key_file": file}, max_num_seqs=2, graph_mode="none") as served:
        for key in ("key-of-a", "key-of-b"):
            body, headers = {"prompt": "2 + 2 =", "max_tokens": 2}, {"Authorization": f"Bearer {key}"}
            assert httpx2.post(f"{served.url}/v1/completions", json=body, headers=headers, timeout=PATIENCE).is_success
        for key, told in ((None, set()), ("key-of-a", {"team-a"}), ("key-of-w", {"watcher", "team-a", "team-b"})):
            text = metrics(served, key)
            assert "ostinato:generation_tokens_total" in text
            assert {name for name in ("watcher", "team-a", "team-b") if name in text} == told
        headers = {"x-api-key": "nobody's"}
        assert httpx2.get(f"{served.url}/metrics", headers=headers, timeout=PATIENCE).status_code == 401


def metrics(served, key=None):
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx2.get(f"{served.url}/metrics", headers=headers, timeout=PATIENCE).text


@pytest.mark.parametrize(
    ("name", "address", "client"),
    [
        ("team", "10.0.0.1", "key team"),
        (None, "10.0.0.1", "address 10.0.0.1"),
        (None, "2001:db8:1:2:3:4:5:6", "address 2001:db8:1:2::/64"),
        (None, "::1", "address ::1"),
        (None, "fe80::1%eth0", "address fe80::/64"),
        (None, None, "address unknown"),
    ],
)
def test_a_client_is_its_key_or_its_address(name, address, client):
    assert client_of(name, address) == client


def test_a_client_has_its_share_by_default_a_quarter():
    assert ServeSettings(host="0.0.0.0", insecure=True, max_waiting=256).client_share(16) == 68
    assert ServeSettings(api_key=("k",), max_waiting=8).client_share(4) == 16  # as many as one request may have
    assert ServeSettings(max_requests_per_client=3).client_share(4) == 3
    assert ServeSettings().client_share(4) is None  # all clients are of this machine


def test_processes_that_read_bodies_get_no_keys(file):
    settings = ServeSettings(api_key=("given",), api_key_file=file).without_keys()
    assert settings.keys == {}
    assert "given" not in repr(settings.model_dump())


@pytest.mark.slow
def test_one_key_cannot_take_the_place_of_another_and_both_are_counted_and_logged(file, caplog):
    serve = {"api_key_file": file, "max_waiting": 6, "max_requests_per_client": 2, "max_n": 2}
    with serving(serve, max_num_seqs=2, graph_mode="none") as served, caplog.at_level(logging.INFO):

        def post(key, **more):
            body = {"prompt": "2 + 2 =", "max_tokens": 4, "ignore_eos": True, **more}
            headers = {"Authorization": f"Bearer {key}"}
            return httpx2.post(f"{served.url}/v1/completions", json=body, headers=headers, timeout=PATIENCE)

        served.probe.hold()
        with ThreadPoolExecutor() as pool:
            taken = [pool.submit(post, "key-of-a") for _ in range(2)]
            served.until(lambda: served.engine.queue_limit.num_unfinished == 2)
            refused = post("key-of-a")
            other = pool.submit(post, "key-alone", n=2)
            served.until(lambda: served.engine.queue_limit.num_unfinished == 4)
            served.probe.go()
            assert [each.result().status_code for each in (*taken, other)] == [200, 200, 200]
        assert refused.status_code == 429
        assert int(refused.headers["Retry-After"]) >= 1
        assert "max_requests_per_client" in refused.json()["error"]["message"]
        assert served.engine.queue_limit.num_clients == 0
        text = metrics(served, "key-of-a") + metrics(served, "key-alone")
    lines = [line for line in text.splitlines() if line.startswith("ostinato:key_")]
    values = {line.rpartition(" ")[0]: float(line.split()[-1]) for line in lines}

    def of(name, key):
        [found] = [value for series, value in values.items() if f"{name}_total" in series and f'key="{key}"' in series]
        return found

    assert (of("key_requests", "team-a"), of("key_refused_requests", "team-a")) == (3, 1)
    assert of("key_generation_tokens", "team-a") == of("key_generation_tokens", "line-3") == 8
    logged = [record.fields for record in caplog.records if record.name == "ostinato.requests"]
    assert {"team-a", "line-3"} <= {fields.get("key") for fields in logged}
    assert "key-of-a" not in caplog.text + text
