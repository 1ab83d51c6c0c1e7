"""`verify` finds recipes equal, one of each kind of memory in its turn."""

from __future__ import annotations

import pytest

from ostinato.verify.verify import Trial, has_passed
from tests.support.recipes import RECIPES
from tests.support.turns import in_turns
from tests.verify.test_verify import printed, verified


@pytest.mark.slow
@pytest.mark.parametrize("name", in_turns([(name,) for name in RECIPES], "verify"))
def test_every_recipe_is_equal(name: str) -> None:
    report = verified(name, Trial(extent="quick", num_prompts=1, max_tokens=4))
    assert has_passed(report), printed(report)
