"""Which paths need a key, and which dialect each speaks: facts of the routers."""

import asyncio
import threading

import httpx2
import pytest
from fastapi import FastAPI

from ostinato.config import EngineConfig
from ostinato.observe.request_record import ResponseCounts
from ostinato.serve.api.openapi_page import DOCUMENT, openapi_routers
from ostinato.serve.api.openapi_page import PATH as DOCS
from ostinato.serve.app import make_api
from ostinato.serve.http.lifecycle import Lifecycle
from ostinato.serve.http.middleware import ApiRouter
from ostinato.serve.settings import ServeSettings
from tests.support.patience import PATIENCE


def rules_of(root_path=""):
    return make_api(Lifecycle(EngineConfig(model="demo"), ServeSettings(root_path=root_path)), ResponseCounts()).rules


def test_only_probes_metrics_and_the_page_are_public():
    api = make_api(Lifecycle(EngineConfig(model="demo"), ServeSettings()), ResponseCounts())
    public = {path for path in [*api.app.openapi()["paths"], "/", DOCUMENT] if api.rules.is_public(path)}
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


def test_the_document_of_the_api_is_made_once_and_beside_the_event_loop():
    made = []

    def document():
        made.append(threading.get_ident())
        return {"info": {"title": "a", "version": "1"}, "paths": {}, "components": {"schemas": {}}}

    app = FastAPI(openapi_url=None)
    for router in openapi_routers(document):
        app.include_router(router)

    async def ask():
        async with httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app), base_url="http://a", timeout=PATIENCE
        ) as client:
            return await asyncio.gather(*map(client.get, (DOCS, DOCUMENT, DOCS, DOCUMENT)))

    answers = asyncio.run(ask())
    assert len(made) == 1
    assert made[0] != threading.get_ident()
    assert "<h1>a 1: the API</h1>" in answers[0].text
    assert answers[1].json()["paths"] == {}
