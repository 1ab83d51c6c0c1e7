"""Which paths need a key, and which dialect each speaks: facts of the routers."""

import pytest

from ostinato.config import EngineConfig
from ostinato.observe.request_record import ResponseCounts
from ostinato.serve.app import make_api
from ostinato.serve.http.lifecycle import Lifecycle
from ostinato.serve.http.middleware import ApiRouter
from ostinato.serve.settings import ServeSettings


def rules_of(root_path=""):
    return make_api(Lifecycle(EngineConfig(model="demo"), ServeSettings(root_path=root_path)), ResponseCounts()).rules


def test_only_probes_metrics_and_the_page_are_public():
    api = make_api(Lifecycle(EngineConfig(model="demo"), ServeSettings()), ResponseCounts())
    public = {path for path in [*api.app.openapi()["paths"], "/", api.app.openapi_url] if api.rules.is_public(path)}
    assert public == {"/", "/health", "/health/live", "/version", "/metrics"}
    assert api.rules.is_public("/page/index.html")
    assert api.rules.is_public("/docs")
    assert not api.rules.is_public("/pages")


def test_the_page_is_public_under_its_prefix_too():
    assert rules_of("/llm").is_public("/llm")
    assert not rules_of().is_public("/llm")


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/messages/nothing"])
def test_paths_of_messages_speak_anthropics_dialect(path):
    assert rules_of().dialect(path) == "anthropic"


@pytest.mark.parametrize("path", ["/api/chat", "/api/tags", "/api/nothing"])
def test_paths_of_api_speak_ollamas_dialect(path):
    assert rules_of().dialect(path) == "ollama"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages_of_others", "/nothing", ""])
def test_all_other_paths_speak_openais_dialect(path):
    assert rules_of().dialect(path) == "openai"


def test_a_dialect_needs_a_prefix_that_tells_its_paths():
    with pytest.raises(AssertionError):
        ApiRouter(dialect="anthropic")
