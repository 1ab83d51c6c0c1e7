"""Frameworks that people build on OpenAI's protocol, as they are: a chat, a stream, a tool that is called and whose
result is answered, an answer that follows a schema. `make soak` runs them, where CLIENTS names the interpreter of an
environment that has them: their packages want other versions than these tests.

The embedded model answers word problems. A grammar makes it call the tool, whose result is such a problem: it can only
be answered by a model that was given it. A calculator is called by the embedded model as it is, for each equation.
"""

import json
import os
import subprocess
from pathlib import Path

import httpx2
import pytest

from tests.support.client_frameworks import CALCULATORS, FRAMEWORKS
from tests.support.patience import PATIENCE
from tests.support.serving import serving

CLIENTS = os.environ.get("CLIENTS")
PROGRAM = Path(__file__).parents[1] / "support/client_frameworks.py"
PINNED = Path(__file__).with_name("clients.txt").read_text().splitlines()
TEMPLATE = """\
{%- for tool in tools or [] -%}{{- tool.function.name + '\\n' -}}{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'tool' or message.role == 'user' and messages[-1].role != 'tool' -%}
{{- 'Q: ' + message.content | trim + '\\nA:' -}}
{%- elif message.role == 'assistant' -%}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>' + call.function | tojson + '</tool_call>' -}}
{%- endfor -%}
{{- ' ' + (message.content or '') | trim + '<|end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
"""
"""The embedded model's, with calls as Hermes has them. A tool's result is a question, in place of the user's."""

pytestmark = pytest.mark.skipif(CLIENTS is None, reason="CLIENTS names no interpreter")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    template = tmp_path_factory.mktemp("template") / "chat_template.jinja"
    template.write_text(TEMPLATE)
    with serving(max_num_seqs=4, chat_template=str(template)) as served:
        yield served
        # Frameworks ask again where an answer is an error of the server's.
        counts = httpx2.get(f"{served.url}/metrics", timeout=PATIENCE).text
        assert 'status="2xx"' in counts
        assert 'status="5xx"' not in counts


def came_of(name, url, *what):
    """What a framework got."""
    own = {"OTEL_SDK_DISABLED", "PYTHONPATH"}
    environment = {name: value for name, value in os.environ.items() if name not in own}
    environment["LITELLM_LOCAL_MODEL_COST_MAP"] = "true"  # instead of one that it would download
    command = [CLIENTS, str(PROGRAM), name, f"{url}/v1", *what]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=PATIENCE)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    came = json.loads(ended.stdout.splitlines()[-1])
    assert f"{name}=={came['version']}" in PINNED
    return came


@pytest.fixture(scope="module", params=FRAMEWORKS)
def came(request, served):
    return came_of(request.param, served.url)


@pytest.fixture(scope="module")
def as_it_is():
    """The server of `ostinato serve demo`."""
    with serving() as served:
        yield served


@pytest.mark.parametrize("name", CALCULATORS)
def test_the_embedded_model_calls_a_calculator_until_it_has_the_answer(as_it_is, name):
    came = came_of(name, as_it_is.url, "calculator")
    assert came["called"] == ["17 + 25", "42 - 9"]
    assert came["answer"].strip() == "#### 33"


def test_a_chat_is_answered(came):
    assert came["plain"].strip() == "8 * 6 = 48. #### 48"


def test_a_stream_gives_the_same_in_pieces(came):
    pieces = [piece for piece in came["streamed"] if piece]
    assert len(pieces) > 1
    assert "".join(pieces) == came["plain"]


def test_a_tool_is_called_and_its_result_is_answered(came):
    assert came["tool"]["called"] in (["north"], ["south"])
    assert came["tool"]["answer"].strip().endswith("#### 42")


def test_an_answer_follows_its_schema(came):
    assert came["schema"]["shop"] in ("north", "south")
    assert came["schema"]["is_open"] in (True, False)
