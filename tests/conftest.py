"""For every test: one thread for torch, since pytest-xdist already gives each core a process of its own. Fixtures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.draws import IMPLEMENTATIONS, choose_draw

torch.set_num_threads(1)


@pytest.fixture(scope="module", params=IMPLEMENTATIONS)
def every_draw(request: pytest.FixtureRequest) -> Iterator[None]:
    """The module's tests run once with each implementation of the kernel `sample`."""
    with pytest.MonkeyPatch.context() as patch:
        choose_draw(patch, request.param)
        yield
