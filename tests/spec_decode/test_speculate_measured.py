"""Drafts for measurement: right as often as asked for, and only for requests of the benchmark."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ostinato import ConfigError, EngineConfig
from ostinato.runner.draft_override import SyntheticDrafts, forced_token_params, override_drafts
from tests.support.checkpoints import random_prompt
from tests.support.engines import greedy
from tests.support.parity import make_engine

NAME = "nemotron_h_head"


def test_no_setting_leads_to_drafts_for_measurement() -> None:
    for method in ("measured:3", "accept:3", "0.8:3"):
        with pytest.raises(ConfigError):
            EngineConfig(model="demo", speculative=method)


@pytest.mark.slow
def test_a_server_never_has_drafts_for_measurement() -> None:
    code = (
        "import sys, ostinato.serve.app, ostinato.serve.server, ostinato.engine.process.engine_process\n"
        "import ostinato.engine.llm, ostinato.engine.core, ostinato.runner.drafting\n"
        "sys.exit(bool({'ostinato.runner.draft_override', 'ostinato.runner.draft_override'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("method", ["mtp", "ngram"])
def test_a_request_of_a_user_is_refused(method: str) -> None:
    engine = make_engine(NAME, speculative=f"{method}:2", max_model_len=64)
    override_drafts(engine.runner, SyntheticDrafts(0.8, engine.spec.vocab_size))
    prompt = random_prompt(9, seed=1)
    for params, is_refused in ((greedy(max_tokens=8), True), (forced_token_params(prompt[-1], 0, 8), False)):
        engine.add_request(prompt, params)
        outputs = []
        while engine.has_unfinished:
            outputs = engine.step()
        [output] = outputs
        assert (output.error is not None) == is_refused
        if is_refused:
            assert "measure speed alone" in str(output.error)
        else:
            assert output.outputs[0].token_ids == [prompt[-1]] * 8
