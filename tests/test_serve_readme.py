"""What the README says of serving works as it stands there."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.serving import serving

README = (Path(__file__).parent.parent / "README.md").read_text()
SECTION = README.split("\n## Serving\n")[1].split("\n## ")[0]
ADDRESS = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def served():
    with serving(max_num_seqs=4) as served:
        yield served


def curl_commands():
    """Each with the lines that continue it."""
    shell = SECTION.split("```python")[0]
    lines = [line.removeprefix("    ") for line in shell.splitlines() if line.startswith("    ")]
    return re.findall(r"^\$ (curl .*(?:\n(?!\$).*)*)", "\n".join(lines), flags=re.MULTILINE)


def run_curl(served, command):
    if shutil.which("curl") is None:
        pytest.skip("there is no curl; apt install curl")
    shell = command.replace(ADDRESS, served.url).replace("curl ", "curl -sS --fail-with-body ", 1)
    return subprocess.run(["bash", "-c", shell], check=True, capture_output=True, text=True, timeout=60).stdout


def test_curl_gets_a_chat_a_stream_and_the_servers_health(served):
    chat, stream, health = [run_curl(served, command) for command in curl_commands()]
    assert json.loads(chat)["choices"][0]["message"]["content"].endswith("#### 42")
    *chunks, done = [line.removeprefix("data: ") for line in stream.splitlines() if line]
    assert done == "[DONE]"
    assert "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks).endswith("#### 42")
    assert json.loads(health) == {"status": "ready"}


def test_the_python_client_gets_the_answer_three_times(served, capsys):
    [code] = re.findall(r"```python\n(.*?)```", SECTION, flags=re.DOTALL)
    exec(compile(code.replace(ADDRESS, served.url), "README.md", "exec"), {})
    assert capsys.readouterr().out.count("#### 48") == 3
