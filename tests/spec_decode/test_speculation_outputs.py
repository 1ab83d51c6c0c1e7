"""Who asks for text cannot tell whether tokens were guessed: whatever is asked of sampling, and however an output ends,
text, tokens, log-probabilities and reasons are those without speculation."""

from __future__ import annotations

from typing import Any

import pytest

from ostinato import LLM, SamplingParams
from ostinato.engine.outputs import RequestOutput
from ostinato.scheduler.batch import TokenLogprobs
from tests.support.checkpoints import EOS
from tests.support.parity import cached
from tests.support.speculation import Watched
from tests.support.text_checkpoint import SETTINGS, text_checkpoint

NAME = "nemotron_h_dense_head"
K = 3
METHODS = ("itself", "ngram", "mtp")
"""The model as its own draft model has all drafts accepted, the others have few."""
PROMPT = "cafe: decade, 漢 and é; decade, "


def make_llm(method: str | None, **settings: Any) -> LLM:
    drafts = {} if method is None else {"speculative_adaptive": "off"}
    if method is not None:
        drafts["speculative"] = f"draft:{text_checkpoint(NAME)}:{K}" if method == "itself" else f"{method}:{K}"
    return LLM(str(text_checkpoint(NAME)), **(SETTINGS | {"max_model_len": 160} | drafts | settings))


@pytest.fixture(scope="module")
def plain() -> LLM:
    return make_llm(None)


@pytest.fixture(scope="module", params=METHODS)
def drafting(request: pytest.FixtureRequest) -> LLM:
    return make_llm(request.param)


@pytest.fixture(scope="module")
def certain() -> LLM:
    """One whose windows are all accepted."""
    return make_llm("itself")


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 30, "ignore_eos": True, **changes})


def sampled(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 30, "ignore_eos": True, "seed": 4, **changes})


def generate(llm: LLM, params: SamplingParams, prompt: str | list[int] = PROMPT) -> RequestOutput:
    [output] = llm.generate(prompt, params)
    assert_empty(llm)
    return output


def assert_empty(llm: LLM) -> None:
    assert not llm.engine.has_unfinished
    llm.engine.scheduler.check_integrity()
    usage = llm.stats()["cache"]
    assert usage["blocks_used"] == usage["slots_used"] == 0


def assert_same(given: RequestOutput, expected: RequestOutput) -> None:
    assert len(given.outputs) == len(expected.outputs)
    for own, wanted in zip(given.outputs, expected.outputs, strict=True):
        assert (own.token_ids, own.text) == (wanted.token_ids, wanted.text)
        assert (own.finish_reason, own.stop_reason) == (wanted.finish_reason, wanted.stop_reason)
        assert_same_logprobs(own.logprobs, wanted.logprobs)
        assert own.cumulative_logprob == pytest.approx(wanted.cumulative_logprob, abs=1e-3)
    assert_same_logprobs(given.prompt_logprobs, expected.prompt_logprobs)


def assert_same_logprobs(
    given: list[TokenLogprobs | None] | list[TokenLogprobs] | None,
    expected: list[TokenLogprobs | None] | list[TokenLogprobs] | None,
) -> None:
    assert (given is None) == (expected is None)
    for own, wanted in zip(given or [], expected or [], strict=True):
        assert (own is None) == (wanted is None)
        if own is not None and wanted is not None:
            assert (own.token_id, own.rank, len(own.top)) == (wanted.token_id, wanted.rank, len(wanted.top))
            values = [own.logprob, *(logprob for _, logprob in own.top)]
            assert values == pytest.approx([wanted.logprob, *(logprob for _, logprob in wanted.top)], abs=1e-4)


# Whatever is asked


PARAMS = {
    "greedy": greedy(),
    "temperature": sampled(temperature=0.6),
    "top_k": sampled(top_k=4),
    "top_p": sampled(top_p=0.5),
    "min_p": sampled(min_p=0.2),
    "repetition_penalty": greedy(repetition_penalty=1.4),
    "presence_penalty": sampled(presence_penalty=1.5, top_k=10),
    "frequency_penalty": greedy(frequency_penalty=1.2),
    "a negative penalty": greedy(frequency_penalty=-0.8),
    "logit_bias": sampled(logit_bias={60: 8.0, 61: 7.5, 62: -100.0}),
    "another seed": sampled(seed=2**63),
    "several samples": sampled(n=3, logprobs=1),
    "logprobs": sampled(logprobs=3),
    "logprobs of none but the token": greedy(logprobs=0),
    "prompt_logprobs": sampled(prompt_logprobs=2, logprobs=2),
    "an end token": sampled(ignore_eos=False, logit_bias={EOS: 3.0}),
    "an end token held back": sampled(ignore_eos=False, logit_bias={EOS: 9.0}, min_tokens=7),
    "end tokens in the text": sampled(logit_bias={EOS: 4.0}, skip_special_tokens=False),
    "stop tokens": sampled(stop_token_ids=tuple(range(60, 80)), logprobs=1),
    "stop tokens held back": sampled(stop_token_ids=tuple(range(2, 120)), min_tokens=9, max_tokens=20, logprobs=1),
    "all at once": sampled(
        temperature=1.3, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.5,
        frequency_penalty=0.2, logit_bias={33: 3.0}, min_tokens=5, stop_token_ids=[33, 40], n=2, logprobs=2,
        prompt_logprobs=1,
    ),
    **{f"max_tokens {count}": sampled(max_tokens=count, logprobs=1) for count in (1, 2, 3, 4, 5, 6)},
}  # fmt: skip


@pytest.mark.parametrize("asked", PARAMS)
def test_an_output_is_the_same_with_and_without_speculation(plain: LLM, drafting: LLM, asked: str) -> None:
    assert_same(generate(drafting, PARAMS[asked]), generate(plain, PARAMS[asked]))


def test_requests_of_all_kinds_do_not_disturb_each_other(plain: LLM, drafting: LLM) -> None:
    params = list(PARAMS.values())
    expected = [generate(plain, each) for each in params]
    for given, wanted in zip(drafting.generate([PROMPT] * len(params), params), expected, strict=True):
        assert_same(given, wanted)
    assert_empty(drafting)


def test_an_output_that_reaches_max_model_len_ends_there(plain: LLM, drafting: LLM) -> None:
    for length in range(150, 157):
        prompt = [5 + i % 90 for i in range(length)]
        given, wanted = (generate(llm, sampled(max_tokens=None), prompt) for llm in (drafting, plain))
        assert_same(given, wanted)
        assert len(given.outputs[0].token_ids) == 160 - length


# Stop strings


def ends_of(text: str, length: int = 3) -> list[str]:
    """Parts of an ASCII stretch of the text that first occur where they were taken from."""
    parts = [text[i : i + length] for i in range(2, len(text) - length)]
    return [part for i, part in enumerate(parts, 2) if part.isascii() and text.index(part) == i]


@pytest.mark.parametrize("keep", [False, True])
def test_a_stop_string_that_is_completed_inside_a_window_ends_the_output_there(
    plain: LLM, certain: LLM, keep: bool
) -> None:
    """Text, tokens and log-probabilities end with the token that completes it, whatever was accepted behind that."""
    watched, cut = Watched(certain.engine), 0
    for stop in ends_of(generate(plain, sampled()).outputs[0].text):
        params = sampled(stop=stop, include_stop_str_in_output=keep, logprobs=1)
        given, expected = (generate(llm, params) for llm in (certain, plain))
        assert expected.outputs[0].stop_reason == stop
        assert_same(given, expected)
        computed = sum(len(result.token_ids) for _, results in watched.steps for result in results.rows)
        cut += computed > len(given.outputs[0].token_ids)
        watched.steps.clear()
    assert cut >= 5


def test_a_stop_string_counts_only_after_min_tokens(plain: LLM, drafting: LLM) -> None:
    for stop in ends_of(generate(plain, greedy()).outputs[0].text, 1)[::3]:
        for min_tokens in (4, 11):
            params = greedy(stop=stop, min_tokens=min_tokens)
            assert_same(generate(drafting, params), generate(plain, params))


@pytest.mark.parametrize("mode", ["align", "all"])
def test_the_next_turn_after_a_stop_string_hits_as_long_as_without_speculation(mode: str) -> None:
    """Wherever it ends, before, at or behind a block boundary, and whatever part of the window stands before that."""
    settings = {"state_cache_mode": mode, "state_block_size": 16 if mode == "all" else 64, "graph_mode": "none"}
    plain, certain = (make_llm(each, **settings) for each in (None, "itself"))
    tokenizer, watched = plain.engine.tokenizer, Watched(certain.engine)
    boundary, passed = 48, 0
    for shift in range(1 + K):
        prompt = [*tokenizer.encode(PROMPT), *range(20, 20 + shift)]
        tokens = generate(plain, sampled(), prompt).outputs[0].token_ids
        for length in range(boundary - 3, boundary + 3):
            output = tokens[: length - len(prompt)]
            stop = tokenizer.decode(output)[-3:]
            if not stop.isascii() or stop in tokenizer.decode(output[:-1]):
                continue
            hits = []
            for llm in (plain, certain):
                llm.reset_prefix_cache()
                watched.steps.clear()
                assert generate(llm, sampled(stop=stop), prompt).outputs[0].token_ids == output
                passed += any(
                    row.start <= length < boundary <= row.start + len(result.token_ids)
                    for batch, results in watched.steps
                    for row, result in zip(batch.rows, results.rows, strict=True)
                )
                turn = [*prompt, *output, *range(20, 30)]
                hits.append(cached(generate(llm, sampled(max_tokens=1), turn)))
            # A window may have computed the text's last token, which plain steps do not.
            assert hits[1] == (boundary if length == boundary and hits[0] < boundary else hits[0])
    assert passed >= 3


# Streams


def test_the_pieces_of_a_stream_make_up_the_text_and_cut_nothing(plain: LLM, drafting: LLM) -> None:
    for seed in range(3):
        text = generate(plain, sampled(seed=seed)).outputs[0].text
        pieces, seen = list(drafting.stream(PROMPT, sampled(seed=seed))), ""
        for piece in pieces:
            seen += piece
            assert text.startswith(seen)
        assert seen == text
        stop = ends_of(text)[-1]
        assert "".join(drafting.stream(PROMPT, sampled(seed=seed, stop=stop))) == text[: text.index(stop)]
    assert_empty(drafting)


def test_a_stream_of_accepted_windows_has_fewer_pieces(plain: LLM, certain: LLM) -> None:
    """So the tests before have seen several tokens per piece."""
    few, many = (len(list(llm.stream(PROMPT, sampled()))) for llm in (certain, plain))
    assert few <= many // 2


# Ends from outside


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_an_aborted_request_keeps_what_it_has_and_disturbs_nobody(plain: LLM, drafting: LLM, steps: int) -> None:
    expected = [generate(plain, sampled(seed=seed, logprobs=1)) for seed in range(3)]
    engine = drafting.engine
    ids = [engine.add_request(PROMPT, sampled(seed=seed, logprobs=1)) for seed in range(3)]
    outputs = [engine.output(request_id) for request_id in ids]
    for _ in range(steps):
        engine.step()
    aborted = engine.abort(ids[1])
    while engine.has_unfinished:
        engine.step()
        engine.scheduler.check_integrity()
    assert_empty(drafting)
    for given, wanted in ((outputs[0], expected[0]), (outputs[2], expected[2])):
        assert given is not None
        assert_same(given, wanted)
    assert aborted is not None
    [own], [wanted] = aborted.outputs, expected[1].outputs
    assert own.finish_reason == "abort"
    assert len(own.token_ids) >= steps
    assert own.token_ids == wanted.token_ids[: len(own.token_ids)]
    assert len(own.logprobs or []) == len(own.token_ids)
    assert wanted.text.startswith(own.text)
