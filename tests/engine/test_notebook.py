"""In a notebook: a kernel of its own runs cells, with an event loop running, and shows what they give."""

from __future__ import annotations

import json
import os
import sys
from html import escape
from pathlib import Path
from typing import Any

import pytest

from ostinato import LLM, SamplingParams
from tests.support.patience import PATIENCE
from tests.support.text_checkpoint import SETTINGS, text_checkpoint

CELLS = f"""
import asyncio
from ostinato import LLM, AsyncLLM, SamplingParams
settings = {SETTINGS!r}
params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
assert asyncio.get_event_loop().is_running()
llm = LLM({str(text_checkpoint())!r}, **settings)
llm
---
llm.plan
---
outputs = llm.generate(["<ab>", "cd", "ef"], params)
outputs[0]
---
outputs[0].outputs[0]
---
print("".join(llm.stream("<ab>", params)))
---
async with AsyncLLM({str(text_checkpoint())!r}, **settings) as other:
    [output] = await other.generate("<ab>", params)
    pieces = [piece async for piece in other.stream("<ab>", params)]
assert output.outputs[0].token_ids == outputs[0].outputs[0].token_ids
print("".join(pieces))
"""


def executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The outputs of each cell."""
    nbclient = pytest.importorskip("nbclient", reason="it comes with the test extra")
    nbformat = pytest.importorskip("nbformat", reason="it comes with nbclient")
    pytest.importorskip("ipykernel", reason="it comes with the test extra")
    kernel = tmp_path / "kernels" / "tested"
    kernel.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "tested", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell.strip()) for cell in CELLS.split("---\n")])
    waits = dict.fromkeys(("timeout", "startup_timeout", "iopub_timeout"), PATIENCE)
    nbclient.NotebookClient(book, kernel_name="tested", **waits).execute()
    return [cell.outputs for cell in book.cells]


@pytest.mark.slow
def test_a_notebook_shows_models_plans_and_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan, output, completion, streamed, from_async = executed(tmp_path, monkeypatch)
    shown = [cell[-1]["data"] for cell in (model, plan, output, completion)]
    with LLM(str(text_checkpoint()), **SETTINGS) as llm:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        text = llm.generate("<ab>", params)[0].outputs[0].text
        assert shown[0]["text/plain"] == repr(llm)
        assert escape(repr(llm)) in shown[0]["text/html"]
    assert "<summary>decisions</summary>" in shown[1]["text/html"]
    assert "max_num_seqs" in shown[1]["text/html"]
    assert "&lt;ab&gt;" in shown[2]["text/html"]
    assert "<ab>" not in shown[2]["text/html"]
    for each in shown[2:]:
        assert escape(text) in each["text/html"]
        assert "4 tokens; length" in each["text/html"]
    assert streamed[-1]["text"] == from_async[-1]["text"] == text + "\n"
    # A bar stands below the cell while it runs, and leaves nothing.
    for cell in (model, output, from_async):
        assert cell[0]["output_type"] == "display_data"
        assert cell[0]["data"] == {"text/html": "", "text/plain": ""}
