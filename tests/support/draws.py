"""The kernel `sample` for tests of sampling: each of its implementations in turn, through the fixture `every_draw`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ostinato.ops.reference import sample
from ostinato.sampling.sampler import SampleKernel
from tests.support.native_sets import SETS, native_kernel

IMPLEMENTATIONS = ["reference", *SETS]
"""The reference, and the native kernel for every instruction set that runs here."""

_chosen: SampleKernel = sample.sample


def draw(*args: Any) -> torch.Tensor:
    """The kernel that the test's fixture has chosen, the reference without one."""
    return _chosen(*args)


def choose_draw(monkeypatch: pytest.MonkeyPatch, implementation: str) -> None:
    native = implementation != "reference"
    kernel = native_kernel(implementation, "sample") if native else sample.sample
    monkeypatch.setattr("tests.support.draws._chosen", kernel)
