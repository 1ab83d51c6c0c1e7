"""On a GPU, too, what nobody has written reaches no logit, and padding writes nothing that anybody reads."""

from __future__ import annotations

import pytest
import torch

from tests.support.checkpoints import RECIPES
from tests.support.gpu import without_overlap
from tests.support.poison import assert_written, poison, record_logits, run, small_engine, watch_writes

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("graph_mode", ["full_and_piecewise", "none"])
@pytest.mark.parametrize("name", RECIPES)
def test_nan_in_null_and_free_memory_reaches_no_logit(name: str, graph_mode: str, device: str) -> None:
    settings = {"device": device, **without_overlap()}
    plain, poisoned = (small_engine(name, "auto", graph_mode, **settings) for _ in range(2))
    watch_writes(poisoned)
    expected_logits, logits = record_logits(plain), record_logits(poisoned)
    expected = run(plain, lambda _: None)
    assert run(poisoned, poison).keys() == expected.keys()
    assert_written(poisoned)
    for own, wanted in zip(logits, expected_logits, strict=True):
        assert own.isfinite().all()
        torch.testing.assert_close(own, wanted, rtol=0, atol=1e-3 * wanted.abs().max().item())
