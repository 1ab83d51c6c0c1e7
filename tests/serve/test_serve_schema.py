"""The server against its own OpenAPI document: requests made up from it, and never an error of the server's own."""

import os

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings

from ostinato.config import EngineConfig
from ostinato.observe.request_record import ResponseCounts
from ostinato.serve.app import make_api
from ostinato.serve.http.lifecycle import Lifecycle
from ostinato.serve.settings import ServeSettings
from tests.support.patience import PATIENCE
from tests.support.serving import serving

EXAMPLES = int(os.environ.get("SCHEMA_EXAMPLES", "12"))
"""Requests made up for each operation."""


@pytest.fixture(scope="module")
def served():
    with serving({"request_timeout": 5.0}, max_num_seqs=4, graph_mode="none", max_model_len=128) as served:
        yield served


api = make_api(Lifecycle(EngineConfig(model="demo"), ServeSettings()), ResponseCounts()).app
document = schemathesis.openapi.from_dict(api.openapi())


@document.parametrize()
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_no_request_that_the_document_allows_makes_the_server_fail(case, served):
    response = case.call(base_url=served.url, timeout=PATIENCE)
    # A deadline that was asked for may pass.
    assert response.status_code < 500 or response.status_code == 504, (response.status_code, response.text)
