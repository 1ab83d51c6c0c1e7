"""OSTINATO_LOG: levels of all logs or of areas, and what the areas say at level debug."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from ostinato.errors import ConfigError
from ostinato.observe.logs import AREAS, CONFIGURED, LEVELS, configure_logs, levels_in, logs_to, set_log_levels
from tests.support.scheduler_steps import make_caching_scheduler, make_request, make_scheduler


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    """Loggers that are as before at the end."""
    found = [logging.getLogger(name) for name in CONFIGURED]
    before = [(logger.handlers[:], logger.propagate, logger.level) for logger in found]
    yield
    for logger, (handlers, propagates, level) in zip(found, before, strict=True):
        logger.handlers[:], logger.propagate = handlers, propagates
        logger.setLevel(level)


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ("", {}),
        ("debug", {"ostinato": logging.DEBUG}),
        ("scheduler,cache", {"ostinato.scheduler": logging.DEBUG, "ostinato.cache": logging.DEBUG}),
        ("scheduler=info, WARNING", {"ostinato.scheduler": logging.INFO, "ostinato": logging.WARNING}),
    ],
)
def test_the_variable_names_a_level_or_areas(text: str, levels: dict[str, int]) -> None:
    assert levels_in(text) == levels


@pytest.mark.parametrize("text", ["loud", "scheduler=loud", "nothing=debug", "scheduler=", "cache,scheduller"])
def test_what_is_unknown_is_refused_with_all_that_is_known(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        levels_in(text)
    assert all(name in error.value.message for name in (*AREAS, *LEVELS))


def test_the_variable_precedes_the_level_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTINATO_LOG", "scheduler,cache=error")
    with logs_to("text", "warning"):
        assert logging.getLogger("ostinato.scheduler").isEnabledFor(logging.DEBUG)
        assert not logging.getLogger("ostinato.cache").isEnabledFor(logging.WARNING)
        assert not logging.getLogger("ostinato.engine").isEnabledFor(logging.INFO)
    assert not logging.getLogger("ostinato.scheduler").isEnabledFor(logging.DEBUG)


def test_a_wrong_variable_is_refused_when_logs_are_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTINATO_LOG", "everything")
    with pytest.raises(ConfigError, match="OSTINATO_LOG=everything"):
        configure_logs("text", "info")


def test_nothing_is_set_without_the_variable() -> None:
    before = logging.getLogger("ostinato").level
    set_log_levels({})
    assert logging.getLogger("ostinato").level == before


def test_the_scheduler_says_what_a_step_has_and_why_a_request_waits(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_request("first", prompt=3))
    scheduler.add(make_request("second", prompt=3))
    with caplog.at_level(logging.DEBUG, "ostinato.scheduler"):
        scheduler.schedule()
    assert caplog.messages == [
        "step 1: 0 decoding and 1 prompt rows, 3 tokens; 1 requests run, 1 wait",
        "request second waits: max_num_seqs 1 is reached",
    ]


def test_a_request_waits_for_tokens_or_for_memory(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_request("first", prompt=8))
    scheduler.add(make_request("second", prompt=8))
    with caplog.at_level(logging.DEBUG, "ostinato.scheduler"):
        scheduler.schedule()
    assert caplog.messages[-1] == "request second waits: the step has max_num_batched_tokens 8"
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add(make_request("first", prompt=8, max_tokens=1))
    scheduler.add(make_request("second", prompt=8, max_tokens=1))
    with caplog.at_level(logging.DEBUG, "ostinato.scheduler"):
        scheduler.schedule()
    assert caplog.messages[-1] == "request second waits: too little cache memory is available"


def test_the_cache_says_what_it_found(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = make_caching_scheduler()
    scheduler.add(make_request("first", prompt=3))
    with caplog.at_level(logging.DEBUG, "ostinato.cache"):
        scheduler.schedule()
    assert caplog.messages == ["request first: 0 of 3 tokens are cached"]


def test_silence_asks_for_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler()
    monkeypatch.setattr(scheduler, "_log_step", lambda batch: pytest.fail("a line was made"))
    scheduler.add(make_request("first"))
    scheduler.schedule()
