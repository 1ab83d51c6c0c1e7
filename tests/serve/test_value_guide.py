"""Grammars of an answer's form behind reasoning accept exactly that form."""

import pytest

from ostinato.sampling.guide import Guide
from ostinato.serve.chat.answer_formats import THINK
from ostinato.serve.chat.guides import value_guide
from tests.serve.test_tool_guide import SPECIAL, accepts

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x/y"]}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("guide", "legal", "illegal"),
    [
        (Guide(json_schema=SCHEMA), '{"a": "x/y"}', '{"a": "z"}'),
        (Guide(json_object=True), '{"b": [1, {}]}', "[1]"),
        (Guide(regex="a/b|c\\/d|\\n\n[/]"), "a/b", "a"),
        (Guide(regex="a/b|c\\/d|\\n\n[/]"), "c/d", "c\\/d"),
        (Guide(regex="a/b|c\\/d|\\n\n[/]"), "\n\n/", "\n/"),
        (Guide(choice=('say "x"', "y/z")), 'say "x"', "say x"),
        (Guide(choice=('say "x"', "y/z")), "y/z", "y"),
    ],
)
def test_the_form_holds_for_what_follows_the_reasoning(guide, legal, illegal):
    free = value_guide(guide, THINK, starts_in_reasoning=False)
    inside = value_guide(guide, THINK, starts_in_reasoning=True)
    for grammar, begin in ((free, ""), (free, "<think>\nOr {}?\n</think>\n\n"), (inside, "Well.\n</think>\n\n")):
        assert accepts(grammar, begin + legal)
        assert not accepts(grammar, begin + illegal)
        assert not accepts(grammar, begin + legal + " more")
    assert not accepts(inside, legal)
    assert not accepts(free, f"Well.</think>{legal}")


def test_tags_that_are_special_tokens_are_named_apart_from_text():
    guide = Guide(choice=("yes", "no"))
    free = value_guide(guide, THINK, False, SPECIAL)
    assert accepts(free, "<think>", "Hm.", "</think>", "\n", "yes")
    assert accepts(free, "no")
    assert not accepts(free, "<think>Hm.</think>yes")
    assert accepts(value_guide(guide, THINK, True, SPECIAL), "Hm.", "</think>", "no")
