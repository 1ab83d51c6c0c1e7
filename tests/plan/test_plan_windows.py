"""What the plan says of layers with a window."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ostinato import EngineConfig
from ostinato.plan.model import DTYPE_BYTES
from ostinato.plan.plan import make_plan
from ostinato.plan.windows import bytes_beyond_windows
from ostinato.units import format_bytes
from tests.support.plan_cases import ATTENTION, GIB, attention_layer, cpu, model

LOCAL = attention_layer(replace(ATTENTION, window=512))


@pytest.mark.parametrize(("max_model_len", "says"), [(4096, True), (513, True), (512, False)])
def test_the_plan_says_that_blocks_outside_windows_are_kept_where_a_request_may_be_longer(
    max_model_len: int, says: bool
) -> None:
    plan = make_plan(EngineConfig(max_model_len=max_model_len), model(LOCAL, attention_layer(), LOCAL), cpu(4 * GIB))
    said = [decision.reason for decision in plan.decisions if decision.topic == "sliding windows"]
    assert bool(said) == says
    assert all("2 of 3 attention layers read the last 512 tokens" in reason for reason in said)


def test_windows_change_nothing_of_the_memory_of_a_plan() -> None:
    plans = [make_plan(EngineConfig(), model(layer, layer), cpu(4 * GIB)) for layer in (LOCAL, attention_layer())]
    assert plans[0].memory == plans[1].memory


def test_the_plan_says_how_much_no_layer_will_read_again() -> None:
    """Of 3 layers of a request of 4096 tokens, 2 read no more than the last 512."""
    spec = model(LOCAL, attention_layer(), LOCAL)
    each = ATTENTION.kv_elements_per_token * DTYPE_BYTES["bfloat16"]
    assert bytes_beyond_windows(spec, 4096, "bfloat16") == 2 * (4096 - 512) * each
    assert bytes_beyond_windows(spec, 500, "bfloat16") == 0
    plan = make_plan(EngineConfig(max_model_len=4096, dtype="bfloat16"), spec, cpu(4 * GIB))
    (said,) = [decision.reason for decision in plan.decisions if decision.topic == "sliding windows"]
    kept, whole = format_bytes(2 * 3584 * each), format_bytes(3 * 4096 * each)
    assert said.endswith(f"in one of max_model_len tokens that is {kept} of {whole}")
