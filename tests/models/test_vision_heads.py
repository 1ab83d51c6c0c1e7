"""A prediction head beside an encoder of images: its drafts change no token; text and images alone decide them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.models.test_vision_parity import GRAPHS, PROMPTS, case_of
from tests.support.heads import HeadReference, Recorder
from tests.support.vision_parity import Case, decided_case, make_engine, oracle_inputs, serve, text
from tests.support.vl_models import vl_head_oracle, vl_oracle

NAMES = ("qwen3_5", "qwen3_5_moe")


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 33}], ids=["whole", "in chunks of 33"])
@pytest.mark.parametrize(("name", "graph_mode"), [*((NAMES[0], mode) for mode in GRAPHS), (NAMES[1], "none")])
def test_drafts_of_a_head_change_no_token(name: str, graph_mode: str, settings: dict[str, Any]) -> None:
    engine = make_engine(name, speculative="mtp:3", speculative_adaptive="off", graph_mode=graph_mode, **settings)
    serve(engine, *(case_of(name, prompt) for prompt in PROMPTS), preempt_at=(4, 11))
    serve(engine, decided_case(name, (text(11),), case_of(name, "several of different sizes")))
    assert engine.stats()["speculation"]["drafts_proposed"] > 0


class CaseReference(HeadReference):
    """Of a case with images. An entry stands where its token does."""

    @torch.inference_mode()
    def __init__(self, name: str, case: Case) -> None:
        model, self._head = vl_oracle(name), vl_head_oracle(name)
        inputs = oracle_inputs(name, case.prompt, case.tokens)
        embedded: list[torch.Tensor] = []
        language_model = model.model.language_model
        hook = language_model.register_forward_pre_hook(
            lambda _, __, given: embedded.append(given["inputs_embeds"][0]), with_kwargs=True
        )
        hidden = model.model(**inputs, use_cache=False).last_hidden_state[0]
        hook.remove()
        self._lm_head, self._embed = model.lm_head, model.get_input_embeddings()
        self._entries = self._head.join(hidden[:-1], embedded[0][1:])
        self._rope = case.prompt.rope

    def _run(self, entries: torch.Tensor) -> torch.Tensor:
        positions = torch.from_numpy(self._rope.of(1, 1 + len(entries))).T[:, None]
        out = self._head.model.model(inputs_embeds=entries[None], position_ids=positions, use_cache=False)
        return out.last_hidden_state[0, -1]


@pytest.mark.parametrize("name", NAMES)
def test_drafts_follow_from_the_text_and_its_images(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [case_of(name, prompt) for prompt in PROMPTS]
    engine = make_engine(name, speculative="mtp:2", speculative_adaptive="off", max_num_batched_tokens=40)
    recorder = Recorder(monkeypatch, engine)
    serve(engine, *cases)
    references = [CaseReference(name, case) for case in cases]
    texts = [(*case.prompt.token_ids, *case.tokens) for case in cases]
    seen = set[int]()
    for proposal in recorder.proposals:
        of = next(i for i, each in enumerate(texts) if each[: len(proposal.text)] == proposal.text)
        expected = references[of].logits(len(proposal.text), proposal.ahead)
        torch.testing.assert_close(proposal.logits, expected, atol=1e-4 * expected.abs().max().item(), rtol=0)
        seen.add(of)
    assert seen == set(range(len(cases)))
    assert {len(proposal.ahead) for proposal in recorder.proposals} == {0, 1}
