"""What outputs gained, as it is handed over: nothing twice, and a prompt's log-probabilities in time."""

from types import SimpleNamespace

from ostinato.engine.outputs import CompletionOutput, RequestOutput, RequestTimes
from ostinato.engine.process.output_deltas import DeltaBuffer
from ostinato.engine.process.request_streams import RequestStream
from ostinato.sampling.params import SamplingParams
from ostinato.scheduler.batch import TokenLogprobs
from ostinato.serve.api.completions import _AwaitingPromptLogprobs

SCORES = [None, TokenLogprobs(6, -0.5, 1)]


def gain(gains, output, index, token):
    """What one sample's next token is handed over as."""
    sample = output.outputs[index]
    sample.token_ids.append(token)
    sample.text += chr(token)
    gains.note([output])
    [delta] = gains.take()
    return delta


def two_samples():
    return RequestOutput("r", None, [5, 6], [CompletionOutput(0), CompletionOutput(1)], RequestTimes(0.0), [None])


def test_log_probabilities_of_a_prompt_come_once_with_the_first_token_of_the_sample_that_scores_it():
    gains, output = DeltaBuffer(), two_samples()
    assert gain(gains, output, 1, 65).prompt_logprobs is None
    output.prompt_logprobs = SCORES
    assert gain(gains, output, 0, 66).prompt_logprobs == SCORES
    assert gain(gains, output, 0, 67).prompt_logprobs is None


def test_requests_that_begin_or_end_do_not_carry_the_gains_of_others_along():
    gains, old, new = DeltaBuffer(), two_samples(), two_samples()
    new.request_id = "new"
    gain(gains, old, 0, 65)
    old.outputs[0].token_ids.append(66)
    old.outputs[0].text += "B"
    gains.note([old, new])
    [delta] = gains.take(urgent_alone=True)
    assert delta.request_id == "new"
    assert not gains.is_urgent
    old.outputs[0].token_ids.append(67)
    old.outputs[0].text += "C"
    gains.note([old])
    [delta] = gains.take()
    assert (delta.request_id, delta.samples[0].text, delta.samples[0].token_ids) == ("r", "BC", (66, 67))
    gains.note([old])
    for sample in old.outputs:
        sample.finish_reason = "length"
    gains.note([old])
    assert gains.is_urgent
    [delta] = gains.take(urgent_alone=True)
    assert delta.output is old
    assert not gains


def test_gains_that_become_one_keep_them():
    gains, output = DeltaBuffer(), two_samples()
    early = gain(gains, output, 1, 65)
    output.prompt_logprobs = SCORES
    scored, late = gain(gains, output, 0, 66), gain(gains, output, 0, 67)
    assert early.merge(scored).merge(late).prompt_logprobs == early.merge(scored.merge(late)).prompt_logprobs == SCORES
    stream = RequestStream("r", 2, lambda: None)
    stream.put(early)
    assert stream.prompt_logprobs is None
    stream.put(scored)
    stream.put(late)
    assert stream.prompt_logprobs == SCORES


def test_an_output_that_comes_before_its_prompt_is_scored_waits_for_that():
    gains, output = DeltaBuffer(), two_samples()
    held = _AwaitingPromptLogprobs(SimpleNamespace(params=SamplingParams(prompt_logprobs=1)))
    first = gain(gains, output, 1, 65), gain(gains, output, 1, 66)
    for delta in first:
        assert list(held.released(0, delta.samples, None)) == []
    output.prompt_logprobs = SCORES
    delta = gain(gains, output, 0, 67)
    released = held.released(0, delta.samples, delta.prompt_logprobs)
    assert [(sample.sample_index, sample.text) for sample in released] == [(0, "C"), (1, "AB")]
    later = gain(gains, output, 1, 68)
    assert [sample.text for sample in held.released(0, later.samples, SCORES)] == ["D"]


def test_a_request_that_is_given_whole_gives_nothing_before_its_end_and_leaves_nothing():
    gains, output = DeltaBuffer(), two_samples()
    gains.hold_until_end("r")
    for sample in output.outputs:
        sample.token_ids.append(65)
        sample.text += "A"
        gains.note([output])
        assert not gains
    for sample in output.outputs:
        sample.finish_reason = "length"
    gains.note([output])
    [delta] = gains.take()
    assert [sample.text for sample in delta.samples] == ["A", "A"]
    assert delta.output is output
    assert gains.num_kept == 0
    gains.hold_until_end("r")
    gains.drop("r")
    assert gains.num_kept == 0
