"""The way of a request passes few files, and its page names those of a decode step."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from ostinato.plan.device.detect import detect

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(detect("cpu").native.isa is None, reason="other files are passed without the kernels")


@pytest.fixture(scope="module")
def tool() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools/trace_step.py"))


def test_the_page_has_the_files_of_a_decode_step(tool: dict[str, Any]) -> None:
    page = tool["PAGE"].read_text(encoding="utf-8")
    assert page == tool["with_table"](page, tool["page_table"]()), "run tools/trace_step.py --write-page"


@pytest.mark.parametrize(
    ("settings", "most"), [({"overlap": "off"}, 24), ({"overlap": "on"}, 24), ({"tensor_parallel_size": 2}, 30)]
)
@pytest.mark.slow
def test_a_decode_step_passes_few_files(tool: dict[str, Any], settings: dict[str, Any], most: int) -> None:
    files = tool["trace_step"](**settings).files
    assert {"engine/core.py", "runner/model_runner.py", "sampling/sampler.py"} <= set(files)
    assert len(files) <= most, sorted(files)


def test_generate_passes_few_files_from_call_to_return(tool: dict[str, Any]) -> None:
    files = tool["trace_generate"]().files
    assert {"engine/llm.py", "engine/input_processor.py", "runner/model_runner.py"} <= set(files)
    assert len(files) <= 43, sorted(files)
