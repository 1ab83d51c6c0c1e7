"""The device of these tests: a GPU, or on request a CPU in its place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """`cuda`; `cpu` with `--gpu-device cpu`. Without a GPU the test is skipped."""
    name: str = request.config.getoption("--gpu-device")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU; --gpu-device cpu runs it on a CPU")
    return name


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """One worker has all tests of an architecture, whose kernels are compiled once and then loaded already."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and isinstance(item, pytest.Function):
            name = item.callspec.params.get("name") if hasattr(item, "callspec") else None
            item.add_marker(pytest.mark.xdist_group(name or item.nodeid))
