"""What passes between a server and its engine's process: messages, however they are cut, and errors."""

import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.engine.process.engine_messages import (
    AbortRequest,
    Channel,
    DeltasHandled,
    MessageDecoder,
    encode_message,
    picklable_error,
    step_error,
)
from ostinato.errors import CaptureError, EngineError, ModelError, Remedy, RequestError, StepFailed


@given(st.lists(st.text(max_size=300)), st.lists(st.integers(1, 40), min_size=1))
def test_messages_are_whole_however_they_are_cut(texts, cuts):
    data = b"".join(encode_message(AbortRequest(text)) for text in texts)
    unpacker, found, begin = MessageDecoder(), [], 0
    while begin < len(data):
        end = begin + cuts[begin % len(cuts)]
        found += unpacker.feed(data[begin:end])
        begin = end
    assert found == [AbortRequest(text) for text in texts]


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Channel(ours), theirs


def test_a_channel_takes_what_has_come_and_waits_only_if_it_may(pair):
    channel, other = pair
    assert channel.receive(0) == []
    assert channel.receive(0.01) == []
    other.sendall(
        encode_message(DeltasHandled(1.0)) + encode_message(DeltasHandled(2.0)) + encode_message(DeltasHandled(3.0))[:5]
    )
    assert channel.receive(None) == [DeltasHandled(1.0), DeltasHandled(2.0)]
    other.close()
    with pytest.raises(EOFError):
        channel.receive(None)


def test_a_message_larger_than_any_buffer_arrives(pair):
    channel, other = pair
    long = AbortRequest("x" * 5_000_000)
    threading.Thread(target=lambda: other.sendall(encode_message(long)), daemon=True).start()
    found = []
    while not found:
        found = channel.receive(None)
    assert found == [long]


@pytest.mark.parametrize("kind", [ModelError, RequestError, CaptureError])
def test_an_error_that_is_the_callers_to_act_on_crosses_as_itself(kind):
    error = kind("lower it", [Remedy("max_num_seqs", 4)])
    [told] = MessageDecoder().feed(encode_message(picklable_error(error)))
    assert type(told) is kind
    assert told.to_json() == error.to_json()


def test_any_other_error_crosses_with_its_name_and_place():
    class Odd(Exception):
        def __init__(self, one, two):
            super().__init__(one, two)

    def here():
        raise Odd(1, 2)

    try:
        here()
    except Odd as error:
        [told] = MessageDecoder().feed(encode_message(picklable_error(error)))
    assert type(told) is EngineError
    assert str(told) == "Odd: (1, 2)"
    assert "in here" in told.__notes__[0]


def test_a_request_of_a_failed_step_is_told_so_and_one_with_an_error_of_its_own_gets_that():
    own = ModelError("not finite")
    assert step_error(own) is own
    assert isinstance(step_error(RuntimeError("why")), StepFailed)
    assert "RuntimeError: why" in str(step_error(RuntimeError("why")))
