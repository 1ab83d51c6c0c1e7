"""Which tokens a grammar allows: those that a whole output can begin with, and an end token where it is whole."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.demo import checkpoint_dir
from ostinato.engine.text.tokenizer import Tokenizer, load_tokenizer
from ostinato.errors import RequestError
from ostinato.sampling.grammar import Grammar, GrammarCompiler, GrammarState
from ostinato.sampling.guide import Guide
from tests.support.guides import (
    EOS,
    GUIDES,
    PAD,
    TOY_TEXTS,
    assert_follows,
    token_ids,
    toy_grammar,
    toy_text,
    toy_tokenizer,
)

VOCAB = 24
SETTLED = settings(deadline=None, max_examples=60)


def text_of(tokens: list[int] | tuple[int, ...]) -> str:
    return "".join(map(toy_text, tokens))


def walk(grammar: Grammar, rng: random.Random, length: int = 300) -> tuple[list[int], bool]:
    """Random tokens that a grammar allows, and whether they are a whole output."""
    output: list[int] = []
    guidance = GrammarState(grammar, output)
    while len(output) < length:
        token = rng.choice(sorted(token_ids(guidance.allowed_mask())))
        if token == EOS:
            return output, True
        ends = guidance.ends_with((token,))
        output.append(token)
        if ends:
            assert guidance.allowed_mask() is None
            return output, True
    return output, False


# Masks


@SETTLED
@given(
    choices=st.lists(st.text(st.sampled_from("abc012- "), max_size=6), min_size=1, max_size=6),
    rng=st.randoms(use_true_random=False),
)
def test_of_choices_those_tokens_are_allowed_that_one_of_them_goes_on_with(
    choices: list[str], rng: random.Random
) -> None:
    output: list[int] = []
    guidance = GrammarState(toy_grammar(Guide(choice=choices)), output)
    while True:
        text = text_of(output)
        going_on = {
            token
            for token in range(2, 2 + len(TOY_TEXTS))
            if any(choice.startswith(text + toy_text(token)) for choice in choices)
        }
        allowed = token_ids(guidance.allowed_mask())
        assert allowed - {EOS} == going_on
        assert (EOS in allowed) is (text in choices)
        token = rng.choice(sorted(allowed))
        if token == EOS:
            break
        whole = text + toy_text(token)
        final = whole in choices and not any(c.startswith(whole) and c != whole for c in choices)
        assert guidance.ends_with((token,)) is final
        output.append(token)
        if final:
            break
    assert text_of(output) in choices


@SETTLED
@given(
    guide=st.sampled_from(
        [
            Guide(regex="(ab|bc|c)*-1{0,3}"),
            Guide(choice=["abc", "ab", "abcabc", "12-12"]),
            Guide(json_object=True),
            Guide(json_schema={"type": "array", "items": {"enum": ["a", "ab", 12, 1]}, "maxItems": 5}),
        ]
    ),
    rng=st.randoms(use_true_random=False),
)
def test_tokens_ahead_change_nothing_and_masks_are_a_function_of_the_tokens_alone(
    guide: Guide, rng: random.Random
) -> None:
    grammar = toy_grammar(guide)
    output: list[int] = []
    guidance = GrammarState(grammar, output)
    for _ in range(12):
        for _ in range(rng.randint(0, 4)):
            ahead = tuple(rng.choices(range(VOCAB), k=rng.randint(1, 3)))
            if rng.random() < 0.7:
                ahead = allowed_ahead(grammar, output, rng)
            fresh = GrammarState(grammar, [*output, *ahead])
            expected = fresh.allowed_mask() if is_allowed(grammar, output, ahead) else None
            assert guidance.allowed_mask(ahead) == expected
        mask = guidance.allowed_mask()
        assert mask == GrammarState(grammar, list(output)).allowed_mask()
        choice = sorted(token_ids(mask) - {EOS})
        if not choice:
            return
        token = rng.choice(choice)
        if rng.random() < 0.5 and guidance.ends_with((token,)):
            return
        output.append(token)
        if GrammarState(grammar, list(output)).allowed_mask() is None:
            return


def allowed_ahead(grammar: Grammar, output: list[int], rng: random.Random) -> tuple[int, ...]:
    ahead: tuple[int, ...] = ()
    for _ in range(rng.randint(1, 3)):
        tokens = token_ids(GrammarState(grammar, [*output, *ahead]).allowed_mask())
        if not tokens - {EOS}:
            break
        ahead += (rng.choice(sorted(tokens - {EOS})),)
    return ahead


def is_allowed(grammar: Grammar, output: list[int], ahead: tuple[int, ...]) -> bool:
    return all(
        token in token_ids(GrammarState(grammar, [*output, *ahead[:i]]).allowed_mask()) and token != EOS
        for i, token in enumerate(ahead)
    )


@pytest.mark.parametrize("vocab_size", [20, 23, 24, 31, 32, 33, 100])
def test_tokens_without_a_text_and_special_ones_are_never_allowed(vocab_size: int) -> None:
    guidance = GrammarState(toy_grammar(Guide(regex="(.|\n)*"), vocab_size), [])
    assert token_ids(guidance.allowed_mask()) == {EOS, *range(2, 2 + len(TOY_TEXTS))}
    assert PAD not in token_ids(guidance.allowed_mask())


def test_every_end_token_is_allowed_where_the_output_may_end() -> None:
    grammar = GrammarCompiler(toy_tokenizer(), 40, [EOS, PAD, 39]).compile(Guide(regex="a|ab"))
    assert token_ids(GrammarState(grammar, []).allowed_mask()) == {2, 18}
    assert token_ids(GrammarState(grammar, [2]).allowed_mask()) == {EOS, PAD, 3}
    assert GrammarState(grammar, [2]).ends_with((EOS,)) is False
    assert GrammarState(grammar, []).ends_with((18,))


def test_an_empty_text_may_be_all_that_a_guide_allows() -> None:
    guidance = GrammarState(toy_grammar(Guide(choice=[""])), [])
    assert token_ids(guidance.allowed_mask()) == {EOS}


@pytest.mark.parametrize("name", GUIDES)
def test_random_tokens_that_a_grammar_allows_make_up_what_its_guide_asks_for(name: str) -> None:
    tokenizer = load_tokenizer(checkpoint_dir())
    grammar = GrammarCompiler(tokenizer, tokenizer.vocab_size, [1]).compile(GUIDES[name])
    for seed in range(12):
        output, whole = walk(grammar, random.Random(seed))
        assert whole
        assert_follows(tokenizer.decode(output), GUIDES[name])


# What cannot be compiled


@pytest.mark.parametrize(
    ("guide", "reason"),
    [
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "a(?=b)"}, "look-around"),
        ({"regex": r"(a)\1"}, "backreferences"),
        ({"json_schema": {"not": {}}}, "schema is false"),
        ({"json_schema": {"type": "thing", "x-guidance": {"lenient": True}}}, "Invalid type"),
        ({"json_schema": {"type": "thing"}}, "Invalid type"),
        ({"json_schema": {"$ref": "http://example.org/a"}}, "not present"),
        ({"json_schema": {"$ref": "#"}}, "no text follows it"),
        ({"json_schema": {"allOf": [{"type": "string"}, {"type": "null"}]}}, "Unsatisfiable"),
        ({"json_schema": {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}}, "oneOf .* anyOf works"),
        ({"json_schema": {"type": "string", "pattern": "(a"}}, "unclosed group"),
        ({"lark": 'begin: "a"'}, "start"),
        ({"lark": 'start: "a" | b'}, "unknown name"),
    ],
)
def test_what_the_library_cannot_do_is_a_request_error_with_its_reason(guide: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        toy_grammar(Guide(**guide))
    assert len(caught.value.message) < 700


def chain(link: Callable[[dict[str, str]], dict[str, Any]], length: int) -> dict[str, Any]:
    """A schema whose definitions lead from one to the next."""
    links = {f"{i}": link({"$ref": f"#/$defs/{i + 1}"}) for i in range(length)}
    return {"$defs": links | {f"{length}": {"type": "string"}}, "$ref": "#/$defs/0"}


HOSTILE = {
    "many groups": Guide(regex="(" * 2000 + "a" + ")" * 2000),
    "many options": Guide(regex="a?" * 2047),
    "nested repetitions": Guide(regex="((((a{0,1000}){0,1000}){0,1000}){0,1000})"),
    "an automaton without end": Guide(regex="(.*a.{300}){3}b"),
    "classes of Unicode": Guide(regex=r"(\w|\d|\p{L}){1,2000}"),
    "deep arrays": Guide(json_schema='{"items": ' * 90 + "{}" + "}" * 90),
    "endless arrays": Guide(json_schema={"type": "array", "minItems": 10**8, "items": {"minItems": 10**8}}),
    "joined patterns": Guide(json_schema={"allOf": [{"pattern": f"a{{{i}}}"} for i in range(12)]}),
    "patterns of names": Guide(json_schema={"patternProperties": {f"^{i}(a|b){{1,20}}$": {} for i in range(48)}}),
    "endless strings": Guide(json_schema={"type": "string", "minLength": 2 * 10**9}),
    "combinations": Guide(
        json_schema={"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(4)]} for i in range(20)]}
    ),
    "a chain of references": Guide(json_schema=chain(lambda reference: reference, 1800)),
    "a chain of unions": Guide(json_schema=chain(lambda reference: {"allOf": [reference]}, 1400)),
    "a chain of arrays": Guide(json_schema=chain(lambda reference: {"items": reference, "minItems": 1}, 1000)),
    "many properties": Guide(json_schema={"properties": {f"p{i}": {"type": "string"} for i in range(480)}}),
    "many names": Guide(json_schema={"enum": [f"v{i}" for i in range(6000)]}),
    "multiples": Guide(json_schema={"prefixItems": [{"multipleOf": 9973}] * 1000}),
    "a chain of rules": Guide(lark="start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(4500)) + 'a4500: "x"'),
    "an ambiguous rule": Guide(lark='start: start start | "a" | ""'),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_guide_meant_to_do_harm_is_refused_or_followed_within_bounds(name: str) -> None:
    """The time limit of the test run is the bound on time: without limits, most of these take minutes or gigabytes."""
    tokenizer = load_tokenizer(checkpoint_dir())
    try:
        grammar = GrammarCompiler(tokenizer, tokenizer.vocab_size, [1]).compile(HOSTILE[name])
    except RequestError:
        return
    output: list[int] = []
    guidance, rng = GrammarState(grammar, output), random.Random(0)
    for _ in range(40):
        tokens = sorted(token_ids(guidance.allowed_mask()) - {EOS})
        assert tokens or guidance.error or EOS in token_ids(guidance.allowed_mask())
        if not tokens:
            break
        token = rng.choice(tokens)
        if guidance.ends_with((token,)):
            break
        output.append(token)


def test_an_automaton_that_grew_too_large_for_one_output_is_not_in_the_way_of_others() -> None:
    tokenizer = load_tokenizer(checkpoint_dir())
    grammar = GrammarCompiler(tokenizer, tokenizer.vocab_size, [1]).compile(Guide(regex="(.*a.{300}){3}b"))
    lengths = []
    for _ in range(2):
        rng, output, guidance = random.Random(5), list[int](), GrammarState(grammar, [])
        guidance = GrammarState(grammar, output)
        # One automaton is full after some 400 of these tokens.
        while len(output) < 700:
            tokens = sorted(token_ids(guidance.allowed_mask()) - {1})
            assert tokens, guidance.error
            output.append(rng.choice(tokens))
        lengths.append(len(output))
    assert lengths == [700, 700]


def test_a_checkpoint_without_a_tokenizer_or_an_end_token_has_no_guides() -> None:
    with pytest.raises(RequestError, match=r"no tokenizer\.json"):
        GrammarCompiler(Tokenizer(None), 24, [EOS]).compile(Guide(regex="a"))
    with pytest.raises(RequestError, match="names no end token"):
        GrammarCompiler(toy_tokenizer(), 24, []).compile(Guide(regex="a"))


# Compiling


def test_a_guide_is_compiled_once_and_the_last_ones_are_kept() -> None:
    compiler = GrammarCompiler(toy_tokenizer(), 24, [EOS])
    first = compiler.compile(Guide(regex="a"))
    assert compiler.compile(Guide(regex="a")) is first
    for i in range(15):
        compiler.compile(Guide(regex="b" * (i + 1)))
    assert compiler.compile(Guide(regex="a")) is first
    for i in range(16):
        compiler.compile(Guide(regex="c" * (i + 1)))
    assert compiler.compile(Guide(regex="a")) is not first


def test_guides_are_compiled_in_many_threads_while_outputs_use_them() -> None:
    compiler = GrammarCompiler(toy_tokenizer(), 24, [EOS])

    def work(seed: int) -> bool:
        rng = random.Random(seed)
        guide = Guide(json_schema={"enum": [f"a{i}" for i in range(rng.randint(1, 3))]})
        output, whole = walk(compiler.compile(guide), rng)
        return whole and json.loads(text_of(output)) in ("a0", "a1", "a2")

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(60)))


SHORT = {"type": "string", "minLength": 3, "maxLength": 1}
IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"enum": []}, r"\$\.enum has no entries, so no value follows it"),
    ({"type": []}, r"\$\.type has no entries"),
    (
        {"type": "object", "properties": {"a": {"minimum": 5, "maximum": 1, "type": "integer"}}, "required": ["a"]},
        r"\$\.properties\.a: Unsatisfiable schema: minimum \(5\) is greater than maximum \(1\)",
    ),
    (
        {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/x"}, "b": {"enum": []}},
            "required": ["a"],
            "$defs": {
                "x": {"type": "array", "items": {"type": "string", "minLength": 3, "maxLength": 1}, "minItems": 1}
            },
        },
        r"\$\[\"\$defs\"\]\.x\.items: Unsatisfiable schema: minLength \(3\)",
    ),
    (
        {"properties": {"q": {"anyOf": [{"pattern": "a(?!b)"}, {"type": "null"}]}}},
        r"\$\.properties\.q\.anyOf\[0\]: regex",
    ),
    (
        {"type": "array", "minItems": 1, "prefixItems": [{"type": "string", "enum": [1]}]},
        r"\$\.prefixItems\[0\]: Unsat",
    ),
    (
        {"type": "string", "allOf": [{"pattern": f".*{letter}.*"} for letter in "abcdefghijk"]},
        r"\$: its patterns, formats and lengths together are too many$",
    ),
    ({"items": {"type": "strin"}}, r"\$\.items: Invalid type: strin"),
    ({"properties": {"a": {"$ref": "#"}}, "enum": []}, r"\$\.enum has no entries"),
    ({"properties": {"a": {"$ref": "#", "minimum": 1}}}, r"\$\.properties\.a: circular references .* not supported$"),
]


@pytest.mark.parametrize(("schema", "why"), IMPOSSIBLE)
def test_a_schema_that_nothing_follows_is_refused_with_the_place_of_the_part(schema: dict[str, Any], why: str) -> None:
    with pytest.raises(RequestError, match=f"guide cannot be compiled: {why}") as error:
        toy_grammar(Guide(json_schema=schema))
    assert "(And" not in error.value.message


def test_a_part_that_may_be_left_out_is_not_blamed() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": []}}, "required": ["b"], "additionalProperties": False}
    with pytest.raises(RequestError, match=r"compiled: \$: Unsatisfiable schema: required property 'b'"):
        toy_grammar(Guide(json_schema=schema))
