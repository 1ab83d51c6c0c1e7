"""Which tokens of an answer are its message's, wherever text and pieces are cut."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.engine.text.tokenizer import Tokenizer
from ostinato.scheduler.batch import TokenLogprobs
from ostinato.serve.chat.answer_parser import AnswerParser
from ostinato.serve.chat.chat_output import MessageLogprobs
from ostinato.serve.chat.text_support import TokenStrings
from tests.support.answer_cases import CLOCK_TEXT, HERMES, TOOLS, numbered_ids
from tests.support.text_checkpoint import byte_level_tokenizer

TOKENIZER = Tokenizer(byte_level_tokenizer())
END = TOKENIZER.eos_token_id or 1
TEXT = SimpleNamespace(tokenizer=TOKENIZER, token_texts=TokenStrings(TOKENIZER))


def tokens_of_message(text, cuts=(), ends=True):
    """The bytes of the tokens that are said to be the message's, per piece and at the end; and its content."""
    token_ids = [*TOKENIZER.encode(text), *([END] if ends else [])]
    parser = AnswerParser(HERMES, tools=TOOLS, starts_in_reasoning=False, new_id=numbered_ids())
    scores = MessageLogprobs(TEXT, skip_special_tokens=True, is_plain=False)
    places = [0, *sorted(cut % (len(token_ids) + 1) for cut in cuts), len(token_ids)]
    found, content, known = [], "", 0
    for begin, end in pairwise(places):
        ids = token_ids[begin:end]
        whole = TOKENIZER.decode(token_ids[:end]).rstrip("\N{REPLACEMENT CHARACTER}")
        delta = parser.push(whole[known:])
        known = len(whole)
        piece = SimpleNamespace(token_ids=ids, logprobs=[TokenLogprobs(token, -1.0, 1) for token in ids])
        found += scores.take(piece, delta)
        content += delta.content
    delta = parser.finish()
    found += scores.take(SimpleNamespace(token_ids=(), logprobs=()), delta)
    rest = scores.rest()
    return b"".join(TEXT.token_texts.bytes_of(each.token_id) for each in found).decode(), rest, content + delta.content


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Hello é漢🙂.", "Hello é漢🙂."),
        ("<think>\nHm, 漢.\n</think>\n\nHello 🙂", "Hello 🙂"),
        (f"So: {CLOCK_TEXT}", "So:"),
        (CLOCK_TEXT, ""),
        ("a <tool_call> b", "a <tool_call> b"),
        ("<think>only", ""),
    ],
)
@given(cuts=st.lists(st.integers(0, 200), max_size=8))
def test_a_messages_tokens_are_those_of_its_text(text, message, cuts):
    found, rest, content = tokens_of_message(text, cuts)
    assert found == content == message
    assert [each.token_id for each in rest][-1:] == [END]


def test_what_ends_an_answer_is_left_at_its_end():
    assert [each.token_id for each in tokens_of_message("Hello")[1]] == [END]
    assert tokens_of_message("Hello", ends=False)[1] == []
