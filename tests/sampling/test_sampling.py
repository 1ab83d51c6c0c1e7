"""Sampling: parameters are checked, processing follows its definitions, and tokens depend on nothing else."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as oracle

from ostinato.errors import ModelError, Remedy, RequestError
from ostinato.ops.reference.sample import restrict
from ostinato.plan.memory.activations import PROMPT_POSITIONS
from ostinato.sampling import sampler
from ostinato.sampling.logits_processing import process_logits
from ostinato.sampling.params import SamplingParams, check_token_ids
from ostinato.sampling.sampler import select_tokens
from ostinato.sampling.state import PendingToken, SamplingState, TokenCounts
from ostinato.scheduler.batch import BatchRow, RowResult
from tests.support.draws import draw
from tests.support.logit_table import LogitTable

pytestmark = pytest.mark.usefixtures("every_draw")

PROMPT = (5, 9, 9, 2)


def sample(logits: torch.Tensor, rows: list[BatchRow]) -> list[RowResult]:
    """The sampler, given logits that are there already."""
    return sampler.sample_rows(LogitTable(logits, rows), rows, kernel=draw)


def state(
    output: list[int] | None = None, eos: tuple[int, ...] = (), sample_index: int = 0, **settings: Any
) -> SamplingState:
    seed = settings.pop("seed", 7)
    return SamplingState(SamplingParams(**settings), PROMPT, output or [], eos, sample_index, seed=seed)


def pending(
    output: list[int] | None = None, eos: tuple[int, ...] = (), ahead: tuple[int, ...] = (), **settings: Any
) -> PendingToken:
    payload = state(output, eos, **settings)
    return PendingToken(payload, len(PROMPT) + len(payload.output_token_ids) + len(ahead), ahead)


def decode_row(payload: SamplingState, name: str = "r") -> BatchRow:
    """The row that computes the last known token."""
    known = [*payload.prompt_token_ids, *payload.output_token_ids]
    return BatchRow(
        name, (known[-1],), len(known) - 1, block_table=(1,), num_logits=1, samples=True, sampling_state=payload
    )


def tokens_of(logits: torch.Tensor, payloads: list[SamplingState]) -> list[int]:
    results = sample(logits, [decode_row(payload) for payload in payloads])
    return [result.token_ids[0] for result in results]


def random_logits(rows: int, vocab_size: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


# Parameters


@pytest.mark.parametrize("name", ["stop", "logit_bias", "guide", "seed", "structured_outputs"])
def test_a_value_that_is_deep_or_holds_itself_is_refused_in_few_words(name):
    deep, itself = [], {"a": 1}
    itself["x"] = itself
    for _ in range(5000):
        deep = [deep]
    guides = ({key: value} for key in ("json_schema", "choice", "regex") for value in (itself, deep, {"items": deep}))
    for value in (deep, itself, *guides, ["x" * 10**6, 1]):
        with pytest.raises(RequestError, match=name) as caught:
            SamplingParams(**{name: value})
        assert len(str(caught.value)) < 5000


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"temperature": -0.5}, Remedy("temperature", 0)),
        ({"top_p": 1.5}, Remedy("top_p", 1)),
        ({"top_p": 0.0}, None),
        ({"top_k": -2}, Remedy("top_k", 0)),
        ({"min_p": 2}, Remedy("min_p", 1)),
        ({"presence_penalty": 3}, Remedy("presence_penalty", 2)),
        ({"frequency_penalty": -3}, Remedy("frequency_penalty", -2)),
        ({"repetition_penalty": 0}, Remedy("repetition_penalty", 0.01)),
        ({"repetition_penalty": 1e39}, Remedy("repetition_penalty", 100)),
        ({"temperature": math.nan}, None),
        ({"temperature": "hot"}, None),
        ({"max_tokens": 0}, Remedy("max_tokens", 1)),
        ({"n": 0}, Remedy("n", 1)),
        ({"n": 1.5}, None),
        ({"logprobs": -1}, Remedy("logprobs", 0)),
        ({"logit_bias": {3: 101.0}}, None),
        ({"logit_bias": {"three": 1.0}}, None),
        ({"logit_bias": {"3": 1.0, 3: 2.0}}, None),
        ({"stop": ["a", ""]}, None),
        ({"stop": 3}, None),
        ({"stop_token_ids": ["x"]}, None),
        ({"seed": 2**64}, None),
    ],
)
def test_an_illegal_value_is_refused_by_name_with_the_nearest_legal_one(
    settings: dict[str, Any], remedy: Remedy | None
) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**settings)
    assert next(iter(settings)) in str(caught.value)
    assert caught.value.remedies == (() if remedy is None else (remedy,))
    for found in caught.value.remedies:
        SamplingParams(**{found.setting: found.value})


def test_an_unknown_parameter_is_refused_and_the_closest_one_named() -> None:
    with pytest.raises(RequestError, match=r"temprature \(did you mean temperature\?\).*known are .*top_k"):
        SamplingParams(temprature=1.0)


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(RequestError, match=r"min_tokens \(9\) is above max_tokens \(8\)"):
        SamplingParams(min_tokens=9, max_tokens=8)
    assert SamplingParams(min_tokens=900, max_tokens=None).min_tokens == 900


def test_a_seed_of_minus_one_is_none_as_in_other_engines() -> None:
    assert SamplingParams(seed=-1) == SamplingParams(seed=None)
    assert SamplingParams(seed=-2).seed == -2
    with pytest.raises(RequestError, match=r"seed=-1\.0"):
        SamplingParams(seed=-1.0)  # type: ignore[typeddict-item]


def test_the_forms_that_requests_in_json_use_are_read() -> None:
    params = SamplingParams(stop="END", stop_token_ids=[3, 4], logit_bias={"17": -100, 4: 2}, top_k=-1, temperature=0)
    assert params.stop == ("END",)
    assert params.stop_token_ids == (3, 4)
    assert params.logit_bias == {17: -100.0, 4: 2.0}
    assert params.top_k == 0
    assert params.greedy
    assert SamplingParams(stop=None, logit_bias=None, stop_token_ids=None) == SamplingParams()


def test_a_changed_copy_is_checked_and_keeps_what_was_not_set() -> None:
    params = SamplingParams(temperature=0.5, stop=["a"])
    changed = params.replace(top_p=0.5)
    assert (changed.temperature, changed.top_p, changed.stop) == (0.5, 0.5, ("a",))
    assert changed.model_fields_set == {"temperature", "stop", "top_p"}
    with pytest.raises(RequestError):
        params.replace(top_p=2)


@pytest.mark.parametrize("settings", [{"logit_bias": {100: 1.0}}, {"stop_token_ids": [-1]}])
def test_token_ids_outside_the_vocabulary_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="between 0 and 99"):
        check_token_ids(SamplingParams(**settings), vocab_size=100)
    check_token_ids(SamplingParams(logit_bias={99: 1.0}, stop_token_ids=[0]), vocab_size=100)


def test_min_tokens_is_refused_where_every_token_ends_the_output() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=[0, 1, 2])
    with pytest.raises(RequestError, match="stop_token_ids") as caught:
        check_token_ids(params, vocab_size=4, eos_token_ids={3})
    assert caught.value.remedies == (Remedy("min_tokens", 0),)
    check_token_ids(params, vocab_size=4)
    check_token_ids(params.replace(ignore_eos=True), vocab_size=4, eos_token_ids={3})
    check_token_ids(params.replace(min_tokens=0), vocab_size=4, eos_token_ids={3})


# Processing, against definitions and against transformers


def truncate_logits(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    settings = np.array([each.draw_settings for each in params], np.float64)
    return torch.from_numpy(restrict(logits.numpy(), settings))


def restricted(logits: torch.Tensor, **settings: Any) -> torch.Tensor:
    return truncate_logits(logits, [SamplingParams(**settings)] * len(logits))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize(
    ("settings", "warpers"),
    [
        ({}, []),
        ({"top_k": 1}, [oracle.TopKLogitsWarper(1)]),
        ({"top_k": 7}, [oracle.TopKLogitsWarper(7)]),
        ({"top_k": 5000}, [oracle.TopKLogitsWarper(5000)]),
        ({"top_p": 0.3}, [oracle.TopPLogitsWarper(0.3)]),
        ({"top_p": 0.97}, [oracle.TopPLogitsWarper(0.97)]),
        ({"min_p": 0.05}, [oracle.MinPLogitsWarper(0.05)]),
        ({"top_k": 40, "top_p": 0.8}, [oracle.TopKLogitsWarper(40), oracle.TopPLogitsWarper(0.8)]),
        (
            {"top_k": 40, "top_p": 0.9, "min_p": 0.1},
            [oracle.TopKLogitsWarper(40), oracle.TopPLogitsWarper(0.9), oracle.MinPLogitsWarper(0.1)],
        ),
    ],
)
def test_restricting_gives_the_distribution_that_transformers_gives(
    settings: dict[str, Any], warpers: list[Any], temperature: float
) -> None:
    logits = random_logits(4, 3000)
    expected = oracle.TemperatureLogitsWarper(temperature)(None, logits)
    for warper in warpers:
        expected = warper(None, expected)
    actual = restricted(logits, temperature=temperature, **settings)
    assert torch.equal(actual.isneginf(), expected.isneginf())
    torch.testing.assert_close(actual.softmax(-1), expected.softmax(-1), rtol=1e-5, atol=1e-7)


def test_top_p_looks_beyond_its_first_window_for_a_flat_distribution() -> None:
    logits = random_logits(2, 5000, scale=0.01)
    kept = (~restricted(logits, top_p=0.9).isneginf()).sum(-1)
    assert ((kept > 4400) & (kept < 4600)).all()


def test_tokens_that_tie_at_a_threshold_are_all_kept() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    assert restricted(logits, top_k=2).isneginf().tolist() == [[True, False, False, False, False, True]]
    assert restricted(logits, top_p=0.6).isneginf().tolist() == [[True, False, False, False, False, True]]


def test_each_row_is_restricted_by_its_own_parameters_only() -> None:
    logits = random_logits(6, 500)
    params = [
        SamplingParams(),
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.5, temperature=0.7),
        SamplingParams(min_p=0.2),
        SamplingParams(top_k=20, top_p=0.9),
        SamplingParams(temperature=2.0),
    ]
    together = truncate_logits(logits, params)
    for row, alone in enumerate(params):
        assert torch.equal(together[row], truncate_logits(logits[row : row + 1], [alone])[0])


def test_extreme_temperatures_neither_overflow_nor_lose_the_best_token() -> None:
    logits = random_logits(3, 100) * 1000
    logits[:, 7] = -math.inf
    for temperature in (1e-300, 1e-6, 1e30, 1e300):
        scaled = restricted(logits, temperature=temperature)
        assert not scaled.isnan().any()
        assert torch.equal(scaled.amax(-1), torch.zeros(3))
    tokens = tokens_of(logits, [state(temperature=1e-300)] * 3)
    assert tokens == logits.argmax(-1).tolist()


def test_repetition_penalty_is_that_of_transformers_over_prompt_and_output() -> None:
    logits = random_logits(1, 50)
    output = [3, 9, 3, 30]
    expected = oracle.RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([[*PROMPT, *output]]), logits.clone())
    actual = logits.clone()
    process_logits(actual, [pending(output, repetition_penalty=1.3)])
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)


def test_frequency_and_presence_penalties_count_the_output_alone() -> None:
    logits = torch.zeros(1, 50)
    process_logits(logits, [pending([3, 9, 3, 30], frequency_penalty=0.5, presence_penalty=0.25)])
    expected = torch.zeros(50)
    expected[3], expected[9], expected[30] = -1.25, -0.75, -0.75
    assert torch.equal(logits[0], expected)


def test_bias_comes_before_the_repetition_penalty() -> None:
    logits = torch.zeros(1, 50)
    process_logits(logits, [pending(logit_bias={5: 2.0, 7: -3.0}, repetition_penalty=2.0)])
    assert (logits[0, 5].item(), logits[0, 7].item()) == (1.0, -3.0)
    assert logits[0].count_nonzero() == 2


def test_min_tokens_rules_out_end_tokens_until_there_are_enough() -> None:
    logits = torch.zeros(3, 10)
    settings: dict[str, Any] = {"min_tokens": 2, "stop_token_ids": [4], "eos": (1, 3)}
    process_logits(logits, [pending([], **settings), pending([8], **settings), pending([8, 8], **settings)])
    for row in (0, 1):
        assert logits[row].isneginf().nonzero().flatten().tolist() == [1, 3, 4]
    assert not logits[2].isneginf().any()


def test_adjusting_touches_no_other_row() -> None:
    logits = random_logits(4, 64)
    changed = logits.clone()
    process_logits(
        changed,
        [pending(), pending([1, 2], repetition_penalty=1.5), pending(), pending(logit_bias={0: 1.0}, min_tokens=1)],
    )
    assert torch.equal(changed[0], logits[0])
    assert torch.equal(changed[2], logits[2])
    assert (changed != logits).any(-1).tolist() == [False, True, False, True]


def counted(counts: TokenCounts, ahead: tuple[int, ...] = ()) -> dict[int, float]:
    token_ids, output_counts = counts.seen(ahead)
    return dict(zip(token_ids.tolist(), output_counts.tolist(), strict=True))


def test_counts_kept_while_the_output_grows_equal_a_fresh_count() -> None:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 300, (1000,), generator=generator).tolist()
    output: list[int] = []
    kept = TokenCounts(PROMPT)
    for start in range(0, 1000, 41):
        output += tokens[start : start + 41]
        kept.update(output)
        kept.update(output)
        assert counted(kept) == {token: output.count(token) for token in {*PROMPT, *output}}


@pytest.mark.parametrize("ahead", [(9,), (77,), (77, 3, 77, 78), (2, 2, 3)])
def test_tokens_ahead_count_as_output_and_leave_nothing_behind(ahead: tuple[int, ...]) -> None:
    output = [3, 9, 3, 30]
    counts = TokenCounts(PROMPT)
    counts.update(output)
    before = counted(counts)
    guessed = [*output, *ahead]
    assert counted(counts, ahead) == {token: guessed.count(token) for token in {*PROMPT, *guessed}}
    assert counted(counts) == before
    counts.update([*output, 77])
    assert counted(counts)[77] == 1


def test_processing_with_tokens_ahead_is_that_of_an_output_that_ends_with_them() -> None:
    settings: dict[str, Any] = {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "logit_bias": {3: 1.5, 8: -2.0},
        "min_tokens": 4,
        "eos": (1,),
    }
    tokens = [8, 3, 8, 60, 5, 5]
    shared = state(tokens[:1], **settings)
    ahead = [PendingToken(shared, len(PROMPT) + 1 + n, tuple(tokens[1 : 1 + n])) for n in range(6)]
    actual = random_logits(6, 64)
    expected = actual.clone()
    process_logits(actual, ahead)
    process_logits(expected, [pending(tokens[: 1 + n], **settings) for n in range(6)])
    assert torch.equal(actual, expected)
    assert actual[:, 1].isneginf().tolist() == [True] * 3 + [False] * 3


def test_a_proposer_chooses_the_token_that_the_sampler_would() -> None:
    logits = random_logits(3, 300)
    payloads = [state(seed=i, temperature=0.9, presence_penalty=1.0) for i in range(3)]
    drafted = [(4,), (), (8, 15)]
    pending_tokens = [
        PendingToken(payload, len(PROMPT) + len(ahead), ahead) for payload, ahead in zip(payloads, drafted, strict=True)
    ]
    chosen = select_tokens(logits, pending_tokens, draw)
    later = [state(list(ahead), seed=i, temperature=0.9, presence_penalty=1.0) for i, ahead in enumerate(drafted)]
    assert chosen == dict(enumerate(tokens_of(logits, later)))


# Sampling


def test_greedy_takes_the_best_token_and_the_lowest_id_of_equals() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [5.0, 1.0, 5.0, 5.0]])
    assert tokens_of(logits, [state(temperature=0)] * 2) == [1, 0]


def test_a_token_depends_on_its_request_alone() -> None:
    vocab_size = 700
    payloads = [
        state(temperature=0),
        state(seed=1),
        state(seed=1, temperature=0.8, top_k=20),
        state(seed=2, top_p=0.8),
        state([4, 4, 8], seed=3, repetition_penalty=1.2, presence_penalty=0.3),
        state(seed=4, min_p=0.1, logit_bias={3: 5.0}),
        state(seed=5, top_k=50, top_p=0.9, min_p=0.01, min_tokens=3, eos=(0,)),
        state([1], temperature=0, frequency_penalty=1.0),
    ]
    for trial in range(20):
        logits = random_logits(len(payloads), vocab_size, seed=trial)
        before = logits.clone()
        together = tokens_of(logits, payloads)
        assert torch.equal(logits, before)
        alone = [tokens_of(logits[i : i + 1], [payload])[0] for i, payload in enumerate(payloads)]
        backwards = tokens_of(logits.flip(0), payloads[::-1])[::-1]
        assert together == alone == backwards


def test_ruling_tokens_out_does_not_change_the_token_if_it_is_not_ruled_out() -> None:
    logits = random_logits(200, 2000, scale=3.0)
    free = tokens_of(logits, [state(seed=i) for i in range(200)])
    kept = restricted(logits, top_k=50) > -math.inf
    limited = tokens_of(logits, [state(seed=i, top_k=50) for i in range(200)])
    agree = [bool(kept[i, token]) for i, token in enumerate(free)]
    assert 50 < sum(agree) < 200
    for i, token in enumerate(limited):
        assert kept[i, token]
        assert not agree[i] or token == free[i]


def test_noise_for_some_candidates_and_for_all_choose_the_same_token(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(64, 3000, scale=8.0)
    payloads = [state(seed=i, temperature=0.9) for i in range(64)]
    few = tokens_of(logits, payloads)
    monkeypatch.setattr("ostinato.ops.reference.sample._HOPELESS", -math.inf)
    assert tokens_of(logits, payloads) == few
    assert few != logits.argmax(-1).tolist()


def test_the_seed_and_the_position_choose_the_token() -> None:
    logits = random_logits(1, 5000, scale=0.5).expand(40, -1).contiguous()
    by_seed = tokens_of(logits, [state(seed=i) for i in range(40)])
    by_position = tokens_of(logits, [state([0] * i) for i in range(40)])
    by_sample = tokens_of(logits, [state(sample_index=i) for i in range(40)])
    for tokens in (by_seed, by_position, by_sample):
        assert len(set(tokens)) > 30
    assert by_sample[0] == by_position[0]
    assert by_seed == tokens_of(logits, [state(seed=i) for i in range(40)])


def test_a_token_is_the_same_after_its_request_was_computed_again_from_the_start() -> None:
    logits = random_logits(20, 500)
    for i in range(20):
        payload = state([3, 1, 4], seed=i, repetition_penalty=1.3)
        known = (*PROMPT, 3, 1, 4)
        again = BatchRow("r", known, 0, block_table=(1,), num_logits=1, samples=True, sampling_state=payload)
        tail = BatchRow("r", known[2:], 2, block_table=(1,), num_logits=1, samples=True, sampling_state=payload)
        rows = [decode_row(payload), again, tail]
        results = [sample(logits[i : i + 1], [row])[0].token_ids for row in rows]
        assert results[0] == results[1] == results[2]


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8, "temperature": 1.3}, {"min_p": 0.1, "top_k": 12}],
)
def test_sampled_tokens_follow_the_processed_distribution(settings: dict[str, Any]) -> None:
    draws = 8000
    logits = random_logits(1, 30, seed=3, scale=1.5)
    tokens = tokens_of(logits.expand(draws, -1).contiguous(), [state(seed=i, **settings) for i in range(draws)])
    expected = restricted(logits, **settings)[0].softmax(-1) * draws
    observed = torch.bincount(torch.tensor(tokens), minlength=30).float()
    possible = expected > 0
    assert observed[~possible].sum() == 0
    statistic = ((observed - expected)[possible] ** 2 / expected[possible]).sum().item()
    freedom = int(possible.sum()) - 1
    assert statistic < freedom + 4.5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_the_error_of_that_row_alone(bad: float, temperature: float) -> None:
    logits = random_logits(3, 20)
    payloads = [state(temperature=temperature, logprobs=2), state(temperature=temperature, logprobs=0), state()]
    rows = [decode_row(payload, name) for payload, name in zip(payloads, ("a", "broken", "c"), strict=True)]
    expected = sample(logits, rows)
    logits[1, 4] = bad
    first, broken, last = sample(logits, rows)
    assert [first, last] == [expected[0], expected[2]]
    assert isinstance(broken.error, ModelError)
    assert "request broken;" in broken.error.message
    assert broken == RowResult("broken", error=broken.error)


# Log-probabilities


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = random_logits(2, 200)
    payloads = [state(logprobs=3, temperature=0.1, logit_bias={7: 50.0}), state(logprobs=0, temperature=0)]
    first, second = sample(logits, [decode_row(payload) for payload in payloads])
    raw = logits.log_softmax(-1)
    assert first.token_ids == (7,)
    assert first.logprobs is not None
    assert first.logprobs[0].token_id == 7
    assert first.logprobs[0].logprob == pytest.approx(raw[0, 7].item(), abs=1e-6)
    assert first.logprobs[0].rank == (logits[0] > logits[0, 7]).sum().item() + 1
    best = raw[0].sort(descending=True)
    assert [token for token, _ in first.logprobs[0].top] == best.indices[:3].tolist()
    assert [value for _, value in first.logprobs[0].top] == pytest.approx(best.values[:3].tolist(), abs=1e-6)
    assert second.logprobs is not None
    assert second.logprobs[0].rank == 1
    assert second.logprobs[0].top == ()


def test_of_equally_likely_tokens_the_lowest_ids_are_listed() -> None:
    logits = torch.zeros(2, 40)
    logits[0, 30] = 1.0
    results = sample(logits, [decode_row(state(temperature=0, logprobs=n)) for n in (4, 99)])
    tops = [[token for token, _ in result.logprobs[0].top] for result in results if result.logprobs]
    assert tops[0] == [30, 0, 1, 2]
    assert tops[1] == list(range(40))


def prefill_row(payload: SamplingState, start: int, end: int, num_logits: int, samples: bool = False) -> BatchRow:
    tokens = tuple(payload.prompt_token_ids[start:end])
    row = BatchRow("p", tokens, start, block_table=(1,), num_logits=num_logits, samples=samples, sampling_state=payload)
    if payload.params.prompt_logprobs is None:
        return row
    return row._replace(num_scored=min(end, len(payload.prompt_token_ids) - 1) - (end - num_logits))


def test_prompt_logprobs_score_each_token_by_the_position_before_it() -> None:
    prompt = [4, 8, 15, 16, 23, 42, 4]
    logits = random_logits(len(prompt), 50)
    raw = logits.log_softmax(-1)
    payload = SamplingState(SamplingParams(prompt_logprobs=2, temperature=0), prompt, [], seed=7)
    whole = sample(logits, [prefill_row(payload, 0, 7, 7, samples=True)])[0]
    assert whole.token_ids == (int(logits[6].argmax()),)
    assert [scored.token_id for scored in whole.prompt_logprobs] == prompt[1:]
    for position, scored in enumerate(whole.prompt_logprobs):
        assert scored.logprob == pytest.approx(raw[position, prompt[position + 1]].item(), abs=1e-6)
        assert [t for t, _ in scored.top] == raw[position].topk(2).indices.tolist()
    first = sample(logits[:3], [prefill_row(payload, 0, 3, 3)])[0]
    rest = sample(logits[3:], [prefill_row(payload, 3, 7, 4, samples=True)])[0]
    assert first.token_ids == ()
    assert first.prompt_logprobs + rest.prompt_logprobs == whole.prompt_logprobs


def test_a_prefill_row_samples_from_its_last_position_beside_rows_without_logits() -> None:
    logits = random_logits(4, 60)
    asks = SamplingState(SamplingParams(prompt_logprobs=0, temperature=0), list(range(20)), [], seed=7)
    quiet = SamplingState(SamplingParams(temperature=0), list(range(20)), [], seed=7)
    results = sample(
        logits,
        [
            decode_row(state(temperature=0)),
            prefill_row(quiet, 0, 10, 0),
            prefill_row(asks, 18, 20, 2, samples=True),
            decode_row(state(temperature=0)),
        ],
    )
    best = logits.argmax(-1).tolist()
    assert [result.token_ids for result in results] == [(best[0],), (), (best[2],), (best[3],)]
    assert [len(result.prompt_logprobs) for result in results] == [0, 0, 1, 0]
    assert results[0].logprobs is None


def test_a_long_prompt_is_scored_in_parts() -> None:
    prompt = list(range(20)) * 10
    payload = SamplingState(SamplingParams(prompt_logprobs=0, temperature=0), prompt, [], seed=7)
    logits = random_logits(200, 20)
    row = prefill_row(payload, 0, 200, 200, samples=True)
    table = LogitTable(logits, [row])
    assert [len(chunk) for chunk in table.chunks] == [1, *[PROMPT_POSITIONS] * 6, 7]
    [result] = sampler.sample_rows(table, [row], kernel=draw)
    assert not table.chunks
    assert len(result.prompt_logprobs) == 199
    assert result.token_ids == (int(logits[-1].argmax()),)


def test_numbers_of_numpy_are_taken_where_python_s_own_are():
    params = SamplingParams(
        top_k=np.int64(4), seed=np.uint64(2**64 - 1), temperature=np.float32(0.5), logprobs=np.int8(3),
        stop_token_ids=[np.int32(7)], logit_bias={np.int64(5): np.float64(1.5)},
    )  # fmt: skip
    assert (params.top_k, params.seed, params.temperature, params.logprobs) == (4, 2**64 - 1, 0.5, 3)
    assert (params.stop_token_ids, params.logit_bias) == ((7,), {5: 1.5})
    assert {type(value) for value in (params.top_k, params.seed, *params.stop_token_ids, *params.logit_bias)} == {int}
    for wrong in (True, np.True_, np.float64(1.5), 1.5):
        with pytest.raises(RequestError, match="top_k"):
            SamplingParams(top_k=wrong)
