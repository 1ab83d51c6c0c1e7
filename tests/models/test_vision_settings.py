"""Settings of text models that hold for models with images too: quantised weights, and a draft model of text alone."""

from __future__ import annotations

import pytest

from tests.support.checkpoints import checkpoint
from tests.support.vision_parity import add, decided_case, images, make_engine, run, serve, text
from tests.support.vl_models import VL_RECIPES, vl_spec

PARTS = (text(9), images((4, 6), (8, 4)), text(12))


@pytest.mark.parametrize("quantization", ["int8", "int8_g128"])
@pytest.mark.parametrize("name", VL_RECIPES)
def test_the_text_part_runs_with_weights_of_8_bits(name: str, quantization: str) -> None:
    """Near the whole weights' log-probabilities, as long as the tokens agree; the plan counts what is allocated."""
    case = decided_case(name, PARTS)
    whole, quantised = make_engine(name), make_engine(name, quantization=quantization)
    outputs = []
    for engine in (whole, quantised):
        outputs.append(add(engine, case, prompt_logprobs=True))
        run(engine)
        assert engine.plan.memory.weights == engine.runner.measured["weight_bytes"]
    assert quantised.plan.memory.weights < whole.plan.memory.weights
    spec = vl_spec(name)
    assert spec.vision is not None
    assert quantised.plan.memory.weights > 4 * spec.vision.parameters
    assert any("the encoder of images" in decision.reason for decision in quantised.plan.decisions)
    given, expected = ([each.logprob for each in output.prompt_logprobs[1:] if each] for output in outputs)
    assert len(given) == len(case.prompt.token_ids) - 1
    errors = [abs(own - right) for own, right in zip(given, expected, strict=True)]
    assert 0 < sum(errors) / len(errors) < 0.1


def test_a_draft_model_of_text_alone_changes_no_token() -> None:
    engine = make_engine("qwen3_vl", speculative=f"draft:{checkpoint('qwen3')}:2", speculative_adaptive="off")
    serve(engine, decided_case("qwen3_vl", PARTS))
    assert engine.stats()["speculation"]["drafts_proposed"] > 0
