"""The device of these tests: a GPU, or on request a CPU in its place."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """`cuda`; `cpu` with `--gpu-device cpu`. Without a GPU the test is skipped."""
    name: str = request.config.getoption("--gpu-device")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU; --gpu-device cpu runs it on a CPU")
    return name
