"""What outputs gained, as it is handed over: nothing twice, and a prompt's log-probabilities in time. Bytes that a slow
reader leaves are counted and bounded."""

import asyncio
import math
import pickle
from types import SimpleNamespace

import pytest

from ostinato.engine.outputs import CompletionOutput, RequestOutput, RequestTimes
from ostinato.engine.process.child import EngineLoop
from ostinato.engine.process.engine_messages import DeltasHandled
from ostinato.engine.process.output_deltas import DeltaBuffer, OutputDelta, PackedLogprobs, SampleDelta, join_deltas
from ostinato.engine.process.queue_limit import QueueLimit
from ostinato.engine.process.request_streams import RequestStream, StreamRegistry
from ostinato.errors import BacklogExceeded
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
    first, last = join_deltas([early, scored]), join_deltas([scored, late])
    assert join_deltas([first, late]).prompt_logprobs == join_deltas([early, last]).prompt_logprobs == SCORES
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


def test_a_long_step_delays_no_deltas_of_the_one_before_it():
    """The server tells during a step that it has handled the last deltas. That is read before those of the step go."""
    output, log = two_samples(), []

    class Engine:
        scheduler = SimpleNamespace(counters=SimpleNamespace(failed_steps=0))
        has_unfinished = True

        def step(self):
            log.append("step")
            output.outputs[0].token_ids.append(65)
            return [output]

        def check_files(self):
            pass

        def reset_prefix_cache(self):
            raise AssertionError("nobody asks for it")

        close = reset_prefix_cache

    class Server:
        def receive(self, _):
            if log.count("step") == 4:
                raise EOFError
            return [DeltasHandled(0.0)] if log[-1] == "step" and "sent" in log else []  # it takes a moment

        def send(self, *messages):
            assert [len(delta.samples) for message in messages for delta in message.deltas] == [1]
            log.append("sent")

    with pytest.raises(EOFError):
        EngineLoop(Engine(), Server()).run()
    assert log == ["step", "sent"] * 3 + ["step"]


def entry(token, num_top):
    return TokenLogprobs(token, -0.1 * token, token + 1, tuple((each, -math.inf) for each in range(num_top)))


def test_packed_log_probabilities_are_the_same_ones_joined_and_sent():
    entries = [None, entry(3, 0), entry(5, 20), entry(7, 2)]
    packed = PackedLogprobs.of(entries)
    assert list(packed) == entries
    assert len(packed) == 4
    assert packed[2] == entries[2]
    assert PackedLogprobs.join(([None], entries, packed[:0], packed)) == [None, *entries, *entries]
    assert pickle.loads(pickle.dumps(packed)) == entries
    assert packed.num_bytes == 4 * 8 + (1 + 21 + 3) * 12
    assert list(PackedLogprobs.join([])) == list(PackedLogprobs()) == []


def delta_of(request_id, text, index=0, scores=0, output=None):
    """A delta of one token per character, with log-probabilities of 20 tokens each if `scores`."""
    ids = tuple(map(ord, text))
    logprobs = PackedLogprobs.of([entry(token, 20) for token in ids]) if scores else None
    sample = SampleDelta(index, text, ids, logprobs, None, None)
    return OutputDelta(request_id, [sample], 0, RequestTimes(0.0), output)


async def fetched(stream):
    return [sample async for delta in stream for sample in delta.samples]


def test_a_slow_reader_gets_everything_in_bounded_parts_and_what_waits_is_counted():
    async def main():
        stream = RequestStream("r", 2, lambda: None)
        deltas = [delta_of("r", chr(65 + i % 26), i % 2, scores=1) for i in range(300)]
        for delta in deltas:
            stream.put(delta)
        assert stream.held_bytes == sum(delta.num_bytes for delta in deltas) > 300 * 200
        stream.end()
        samples = await fetched(stream)
        assert stream.held_bytes == 0
        return deltas, samples

    deltas, samples = asyncio.run(main())
    assert max(len(sample.token_ids) for sample in samples) <= 64
    for index in (0, 1):
        whole = join_deltas(deltas).samples[index]
        own = [sample for sample in samples if sample.sample_index == index]
        assert "".join(sample.text for sample in own) == whole.text
        assert PackedLogprobs.join([sample.logprobs for sample in own]) == whole.logprobs


def test_the_answer_that_holds_most_is_cut_when_its_client_leaves_too_much_and_no_other():
    async def main():
        sent = []
        registry = StreamRegistry(QueueLimit(8, 8), sent.append)
        registry.backlog.max_bytes = 10_000
        streams = {}
        for name, client in (("small", "a"), ("large", "a"), ("other", "b"), ("free", None)):
            streams[name] = registry.open(1, client, None)
            with registry.submitting(streams[name], ends=True):
                pass

        def put(name, count):
            registry.deliver([delta_of(streams[name].request_id, "x" * count, scores=1)])

        for name in ("small", "large", "other", "free"):
            put(name, 12)
        put("large", 12)
        put("free", 1000)
        assert not any(stream.ended for stream in streams.values())
        put("small", 2)
        assert [name for name, stream in streams.items() if stream.ended] == ["large"]
        assert [message.request_id for message in sent if hasattr(message, "request_id")] == [
            streams["large"].request_id
        ]
        assert streams["large"].held_bytes == 0
        with pytest.raises(BacklogExceeded, match="client_backlog"):
            await fetched(streams["large"])
        # What is read, or closed, is not charged any more.
        assert registry.backlog.held_bytes == {"a": streams["small"].held_bytes, "b": streams["other"].held_bytes}
        await anext(streams["small"])
        streams["other"].close()
        assert not registry.backlog.held_bytes

    asyncio.run(main())


def test_a_whole_output_is_charged_until_its_reader_has_sent_it():
    async def main():
        stream = RequestStream("r", 1, lambda: None)
        output = RequestOutput("r", None, [5], [CompletionOutput(0, "x" * 100, [7] * 100)], RequestTimes(0.0))
        output.outputs[0].logprobs = PackedLogprobs.of([entry(7, 20)] * 100)
        stream.put(delta_of("r", "x" * 100, scores=1, output=output))
        stream.end()
        before = stream.held_bytes
        await fetched(stream)
        assert 0 < stream.held_bytes == before // 2
        stream.close()
        assert stream.held_bytes == 0

    asyncio.run(main())
