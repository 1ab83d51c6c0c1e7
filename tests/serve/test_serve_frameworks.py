"""What people build on OpenAI's protocol, against the server as it is: a tool's call and an answer of a schema each.
`make soak` runs them, where FRAMEWORKS names a Python that has the packages."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.serve.test_serve_tools import serve
from tests.support.chat_templates import HERMES
from tests.support.patience import PATIENCE

PYTHON = os.environ.get("FRAMEWORKS")
PROGRAM = Path(__file__).parents[1] / "support/frameworks.py"
NAMES = ("litellm", "langchain", "instructor", "pydantic_ai", "llama_index")
# A tiny random model, whose grammar makes calls and answers well-formed.
pytestmark = pytest.mark.skipif(PYTHON is None, reason="FRAMEWORKS names no Python")


@pytest.fixture(scope="module")
def served():
    with serve(HERMES) as served:
        yield served


@pytest.mark.parametrize("name", NAMES)
def test_a_framework_gets_its_call_and_its_answer(served, name, tmp_path):
    environment = {each: value for each, value in os.environ.items() if each not in ("PYTHONPATH", "OPENAI_API_KEY")}
    environment |= {"HOME": str(tmp_path), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    command = [PYTHON, str(PROGRAM), name, f"{served.url}/v1"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["call"]["city"] in ("Rome", "Oslo")
    assert found["verdict"]["ok"] in (True, False)
