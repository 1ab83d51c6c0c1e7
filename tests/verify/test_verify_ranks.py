"""`ostinato verify` with ranks: drafts of every kind are made right and wrong on all of them, and mistakes are seen."""

from __future__ import annotations

from typing import Any

import pytest

from ostinato.verify.verify import Trial, has_passed
from tests.support.checkpoints import checkpoint
from tests.verify.test_verify import ONE_WAY, accept_wrong_drafts, printed, verdicts, verified


def of_ranks(method: str, max_tokens: int = 8) -> dict[str, Any]:
    """The report of drafts by the model's head, or by the model itself as its draft model, which is always right."""
    name, model = ("nemotron_h_head", {}) if method == "mtp" else ("llama", {"model": str(checkpoint("llama"))})
    speculative = {"method": method, "num_speculative_tokens": 3, **model}
    settings = ONE_WAY | {"speculative": speculative, "tensor_parallel_size": 2}
    return verified(name, Trial(num_prompts=0, max_tokens=max_tokens), **settings)


METHODS = pytest.mark.parametrize("method", [pytest.param("mtp", marks=pytest.mark.ranks), "draft"])


@METHODS
def test_drafts_with_weights_are_steered_on_all_ranks_and_give_the_tokens_of_one_process(method: str) -> None:
    report = of_ranks(method)
    assert has_passed(report)
    assert verdicts(report) == {"equal"}, printed(report)
    assert [note for cell in report["cells"] for note in cell["notes"] if "draft" in note] == []
    # A step ahead is left out with drafts, as in one process.
    assert not any("draft" in reason for reason in report["left_out"] if not reason.startswith("overlap on"))


@METHODS
def test_drafts_with_weights_that_are_wrongly_accepted_are_found(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    accept_wrong_drafts(monkeypatch)
    report = of_ranks(method, max_tokens=16)
    assert report["plain"]["verdict"] == "equal"
    assert not has_passed(report)
    assert report["summary"]["different"] > 0 == report["summary"]["error"]
