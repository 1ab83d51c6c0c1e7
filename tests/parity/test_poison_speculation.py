"""What drafts leave or lack never reaches a logit: rejected ones, rows with fewer of them than others, and the memory
and graphs of what makes them."""

from __future__ import annotations

import pytest

from ostinato.engine.core import EngineCore
from ostinato.layers.attention import Attention
from ostinato.models.base import PredictionHead
from tests.support.assistants import assistant_checkpoint
from tests.support.checkpoints import checkpoint
from tests.support.engines import complete, greedy
from tests.support.parity import make_engine
from tests.support.poison import (
    ARRIVALS,
    assert_same_logits,
    assert_written,
    poison,
    record_logits,
    run,
    small_engine,
    watch_writes,
)
from tests.support.speculation import Outputs, Watched, script, uneven

K = 2

SPECULATIVE_ENGINES = [
    ("nemotron_h_head", "mtp", "all", 16, "full_and_piecewise"),
    ("nemotron_h_head", "mtp", "align", 16, "none"),
    ("nemotron_h_deep_head", "mtp", "all", 9, "full_and_piecewise"),
    ("nemotron_h_stateless_head", "mtp", "align", 12, "full_decode_only"),
    ("nemotron_h", "ngram", "all", 16, "full_and_piecewise"),
    ("bamba", "ngram", "none", 9, "piecewise"),
    ("llama", "draft:nemotron_h_dense", "all", 16, "full_and_piecewise"),
    ("mamba2", "draft:llama", "align", 12, "none"),
    ("gemma4_text", "assistant:plain", "all", 16, "full_and_piecewise"),
    ("gemma4", "assistant:clusters", "align", 12, "none"),
]
"""Recipe, method with the draft model, mode of the state cache, slots, graph mode."""


def expected_outputs(name: str) -> Outputs:
    """The tokens of all prompts that arrive."""
    engine, outputs = make_engine(name, graph_mode="none"), dict[tuple[int, ...], list[int]]()
    for _, prompt, _ in ARRIVALS.values():
        outputs[tuple(prompt)] = complete(engine, prompt, greedy(max_tokens=60)).outputs[0].token_ids
    return outputs


def speculating_engine(
    name: str, method: str, mode: str, num_slots: int, graph_mode: str, outputs: Outputs
) -> EngineCore:
    """Its rows have any number of drafts, of which any number is right; those of a draft model are its own."""
    kind, _, draft = method.partition(":")
    directory = assistant_checkpoint(name, draft) if kind == "assistant" else checkpoint(draft) if draft else None
    speculative = f"{kind}:{K}" if directory is None else f"draft:{directory}:{K}"
    engine = small_engine(
        name, mode, graph_mode, num_slots=num_slots, max_num_batched_tokens=3 * (1 + K) + 16, speculative=speculative,
        speculative_adaptive="off",
    )  # fmt: skip
    if kind != "draft":
        script(engine, outputs, uneven(K), keep=kind != "ngram")
    return engine


@pytest.mark.parametrize("case", SPECULATIVE_ENGINES, ids=lambda case: "-".join(map(str, case)))
@pytest.mark.slow
def test_what_drafts_have_left_or_lack_never_reaches_a_logit(case: tuple[str, str, str, int, str]) -> None:
    """The same steps with and without poison after each of them give the same bits, and no step writes what is not its
    rows' and their drafts' to write."""
    outputs = expected_outputs(case[0])
    plain, poisoned = (speculating_engine(*case, outputs) for _ in range(2))
    watch_writes(poisoned)
    watched = Watched(poisoned)
    expected_logits, logits = record_logits(plain), record_logits(poisoned)
    expected = run(plain, lambda _: None)
    assert run(poisoned, poison) == expected
    for request_id, prompt, new in ARRIVALS.values():
        if request_id != "d":  # which is aborted
            assert expected[request_id] == ("length", outputs[tuple(prompt)][:new])
    assert_same_logits(logits, expected_logits)
    verdicts = watched.verdicts()
    assert {given for given, _ in verdicts} == set(range(1 + K))
    if not case[1].startswith("draft"):
        assert {accepted for _, accepted in verdicts} == set(range(1 + K))
    assert poisoned.scheduler.counters.preemptions >= 3
    assert_written(poisoned)


@pytest.mark.slow
def test_a_key_of_a_texts_first_token_would_be_seen_if_a_head_read_it() -> None:
    case = SPECULATIVE_ENGINES[1]
    engine = speculating_engine(*case, expected_outputs(case[0]))
    logits = record_logits(engine)
    head = engine.runner.model.head
    assert isinstance(head, PredictionHead)
    for block in head.blocks:
        if isinstance(block.mixer, Attention):
            block.mixer.first_key = 0
    run(engine, poison)
    assert any(each.isnan().any() for each in logits)
