"""`ostinato bench serve` against a server that is not ours, with the habits that such servers have."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ostinato.cli.main import main
from tests.support.quirky_openai import TEXTS, quirky_openai

FLAGS = ["--requests", "4", "--prompt-tokens", "20", "--output-tokens", "3", "--concurrency", "2", "--timeout", "60"]
TRIALS = 3
"""Requests before those that count."""


def bench(capsys: pytest.CaptureFixture[str], base_url: str, *flags: str) -> dict[str, Any]:
    """The figures of the one run."""
    with pytest.raises(SystemExit) as end:
        main(["bench", "serve", "--base-url", base_url, *FLAGS, *flags, "--json"])
    printed = capsys.readouterr()
    assert not end.value.code, printed.err
    [result] = json.loads(printed.out)["results"]
    return result


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("cut", [0, 1, 7, 64])
def test_events_are_counted_however_they_are_written_and_cut(
    capsys: pytest.CaptureFixture[str], endpoint: str, cut: int
) -> None:
    with quirky_openai(cut=cut) as server:
        result = bench(capsys, server.base_url, "--endpoint", endpoint)
    assert (result["complete"], result["errors"], result["empty"]) == (4, {}, 0)
    assert (result["tokens"]["output"], result["tokens"]["chunks"], result["tokens"]["uncounted"]) == (12, 12, 0)
    # The server counts two tokens a word and three of its own; 20 were asked for.
    assert result["tokens"]["prompt"] == pytest.approx(4 * 20, abs=4)
    assert server.bodies[0]["model"] == "other"


@pytest.mark.parametrize(
    "quirk", ["no_usage", "no_blank_line", "no_last_line", "http_1_0", "no_last_chunk", "early_hints"]
)
def test_replies_that_are_all_there_are_complete(capsys: pytest.CaptureFixture[str], quirk: str) -> None:
    with quirky_openai(lambda number: quirk) as server:
        result = bench(capsys, server.base_url)
    assert (result["complete"], result["errors"]) == (4, {})
    assert result["tokens"]["output"] == 12
    assert result["tokens"]["uncounted"] == (4 if quirk == "no_usage" else 0)


@pytest.mark.parametrize(
    ("quirk", "kind", "detail"),
    [
        ("error", "error_event", "out of memory"),
        ("error_object", "error_event", "out of memory"),
        ("error_event", "error_event", "out of memory"),
        ("parts", "bad_reply", "another form"),
        ("odd_usage", "bad_reply", "another form"),
        ("reset", "broken_stream", "connection ended"),
        ("429", "http_429", "slow down (Retry-After: 7)"),
        ("moved", "http_308", "Location: /v2/completions"),
    ],
)
@pytest.mark.parametrize("cut", [0, 3])
def test_a_reply_that_fails_is_counted_by_its_kind_and_the_others_go_on(
    capsys: pytest.CaptureFixture[str], quirk: str, kind: str, detail: str, cut: int
) -> None:
    with quirky_openai(lambda number: quirk if number == TRIALS + 1 else "", cut) as server:
        result = bench(capsys, server.base_url)
    assert (result["complete"], result["errors"]) == (3, {kind: 1})
    assert detail in result["error_details"][kind]
    assert result["tokens"]["output"] == 9
    assert len(server.bodies) == TRIALS + 4


def test_conversations_go_on_with_what_the_server_said(capsys: pytest.CaptureFixture[str]) -> None:
    with quirky_openai(cut=5) as server:
        result = bench(capsys, server.base_url, "--turns", "2", "--endpoint", "chat")
    assert result["complete"] == 8
    said = [body["messages"][1]["content"] for body in server.bodies if len(body["messages"]) == 3]
    assert said == ["".join(TEXTS[:3])] * 4


def test_a_server_that_refuses_the_first_request_is_named_with_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    with quirky_openai(lambda number: "429") as server, pytest.raises(SystemExit) as end:
        main(["bench", "serve", "--base-url", server.base_url, *FLAGS])
    told = capsys.readouterr().err
    assert end.value.code
    assert "http_429" in told
    assert "Retry-After: 7" in told.replace("\n", " ")
