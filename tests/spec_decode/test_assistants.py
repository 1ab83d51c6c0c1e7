"""Drafts of Gemma 4's assistants: they are those of transformers, follow from the accepted text alone, and change no
token."""

from __future__ import annotations

import pytest

from tests.spec_decode.test_speculation_drafts import GRAPHS, cases_of, check_proposals, finds, serve
from tests.support.assistants import AssistantReference, assistant_checkpoint
from tests.support.heads import Recorder
from tests.support.speculation import Watched, at_random, drafting_engine, outputs_of, script

ASSISTANTS = [
    ("gemma4_text", "plain", "all", 3, "full_and_piecewise"),
    ("gemma4_text", "clusters", "align", 2, "none"),
    ("gemma4", "untied", "none", 4, "full_and_piecewise"),
    ("gemma4", "plain", "all", 1, "none"),
]
"""Recipe, kind of the assistant, mode of the state cache, k, graph mode."""


@pytest.mark.parametrize(("name", "kind", "mode", "k", "graph_mode"), ASSISTANTS)
def test_drafts_of_an_assistant_follow_from_the_accepted_text_alone(
    monkeypatch: pytest.MonkeyPatch, name: str, kind: str, mode: str, k: int, graph_mode: str
) -> None:
    cases = cases_of(name)
    engine = drafting_engine(
        name, f"draft:{assistant_checkpoint(name, kind)}:{k}", state_cache_mode=mode, graph_mode=graph_mode,
        max_num_batched_tokens=40, **GRAPHS[graph_mode],
    )  # fmt: skip
    recorder, watched = Recorder(monkeypatch, engine), Watched(engine)
    # Its own drafts are thrown away for some of which any number is right.
    script(engine, outputs_of(cases), at_random(k), keep=True)
    serve(engine, cases)
    assert {accepted for given, accepted in watched.verdicts() if given == k} == set(range(k + 1))
    check_proposals(
        recorder.proposals, k, lambda target, text: AssistantReference(target, kind, text), name, cases, finds(engine)
    )
