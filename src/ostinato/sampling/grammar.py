"""Grammars: guides compiled for a tokenizer, which decide the next tokens. The library is imported on use.

The library names no place in a schema that it refuses; `located_reason` finds it.
"""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from ostinato.errors import RequestError
from ostinato.json_io import JsonMapping, JsonObject
from ostinato.sampling.guide import Guide, lark_grammar
from ostinato.sampling.json_schema import NAMED_SCHEMAS, ONE_SCHEMA, SCHEMA_LISTS, SchemaRewriter, follow_pointer
from ostinato.sampling.schema_limits import Place, path

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer


_SEARCH_SECONDS = 0.25
"""Most seconds of a processor for a search."""
_REQUIRED_PROPERTY = re.compile("required property '(.*)' is unsatisfiable$")
_REQUIRED_ITEM = re.compile(r"required item is unsatisfiable$|prefixItems\[\d+\] is unsatisfiable")


T = TypeVar("T")

STACK_BYTES = 2**28
"""Stack on which a guide is compiled; only used parts take memory, and the longest guide needs under a quarter."""
_TRIED_TOKENS = 8
_NUM_CACHED = 16
_STACK_LOCK = threading.Lock()
# Most tokens that a matcher takes in one step.
_PIECE = 16
_MAX_REASON = 500
_ONE_OF = "Enable 'coerce_one_of' option to approximate oneOf with anyOf"
"""Advice of the library that cannot be followed here."""
# The library's excerpt of the grammar's lines around an error.
_EXCERPT = re.compile(r"\n\s*\d+ \| ")
# The library's form of joined regular expressions, and its name of a definition, which the schema does not have.
_AUTOMATON = re.compile(
    r":? \((And|Or|Not|Concat|Repeat|SearchRegex|Regex|Literal)\b.*|( while processing|:) json-schema:.*"
)
_PLAIN = {
    "Unable to determine if regex is empty": "its patterns, formats and lengths together are too many",
    "Regex is empty": "no text follows its patterns, format and lengths together",
}
# The library's position of an error in a generated grammar.
_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")


class TokenizerSource(Protocol):
    """The parts of a tokenizer that a grammar needs."""

    @property
    def max_token_id(self) -> int: ...
    def to_json(self) -> str | None: ...


class Grammar:
    """A compiled guide. It serves any number of outputs, of one engine."""

    def __init__(self, guide: Guide, eos_token_ids: Collection[int], make: Callable[[], LLMatcher]) -> None:
        """Compile the guide with `make`, and raise what that raises."""
        self.guide = guide
        self.eos_token_ids = frozenset(eos_token_ids)
        self._make = make
        self._first = _with_large_stack(make)

    def start(self) -> LLMatcher:
        """Return a matcher before the first token; all share the automaton that their tokens have built."""
        return self._first.deep_copy()

    def restart(self) -> LLMatcher:
        """Return a matcher with a new automaton, which later matchers share, after the last one grew too large."""
        self._first = _with_large_stack(self._make)
        return self.start()


class GrammarCompiler:
    """Compiler of guides for one tokenizer; it keeps the last few. Any thread may call it."""

    def __init__(self, tokenizer: TokenizerSource, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """Set up the compiler. `vocab_size` is the model's, which may be padded.

        Those of `eos_token_ids` that the tokenizer knows end an output where its grammar may end.
        """
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[Guide, Grammar] = OrderedDict()
        self._lock = threading.Lock()
        self._tokenizer_lock = threading.Lock()

    def compile(self, guide: Guide) -> Grammar:
        """Return the grammar of a guide. Compiling takes from a millisecond to about a second, without the GIL.

        Raises RequestError, with the library's reason, if it cannot be compiled, or not for this tokenizer.
        """
        with self._lock:
            if guide in self._kept:
                self._kept.move_to_end(guide)
                return self._kept[guide]
        tokenizer = self.prepare()
        grammar = Grammar(guide, tokenizer.eos_tokens, partial(_make_matcher, guide, tokenizer))
        with self._lock:
            self._kept[guide] = grammar
            if len(self._kept) > _NUM_CACHED:
                self._kept.popitem(last=False)
        return grammar

    def try_out(self, guide: Guide) -> None:
        """Compile a guide and follow it for a few tokens, without keeping it.

        RequestError if that is too much for the library.
        """
        tokenizer = self.prepare()
        grammar = Grammar(guide, tokenizer.eos_tokens, partial(_make_matcher, guide, tokenizer))
        output: list[int] = []
        guidance, rng = GrammarState(grammar, output), random.Random(0)
        while len(output) < _TRIED_TOKENS and (mask := guidance.allowed_mask()) is not None:
            tokens = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
            token = int(tokens[rng.randrange(len(tokens))])
            if token in grammar.eos_token_ids or guidance.ends_with((token,)):
                break
            output.append(token)
        if guidance.error is not None:
            raise _refused(guidance.error)

    def prepare(self) -> LLTokenizer:
        """Return the tokenizer's tokens as a tree of bytes; made once, in up to some seconds for a large vocabulary."""
        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = _read_tokenizer(self._source, self._vocab_size, self._eos_token_ids)
            return self._tokenizer


def _read_tokenizer(source: TokenizerSource, vocab_size: int, eos_token_ids: Collection[int]) -> LLTokenizer:
    from llguidance import LLTokenizer

    text = source.to_json()
    if text is None:
        raise RequestError("this checkpoint has no tokenizer.json, so nothing can guide the text of its outputs")
    ends = sorted(token for token in eos_token_ids if token <= source.max_token_id)
    if not ends:
        raise RequestError(
            "this checkpoint names no end token (eos_token_id) that its tokenizer knows, with which a guided output "
            "could end"
        )
    try:
        return LLTokenizer(text, n_vocab=max(vocab_size, source.max_token_id + 1), eos_token=ends)
    except ValueError as error:
        raise RequestError(f"the tokenizer of this checkpoint cannot be used with a guide: {error}") from None


def _make_matcher(guide: Guide, tokenizer: LLTokenizer) -> LLMatcher:
    """Return a matcher before the first token. Raises RequestError if the guide cannot be compiled."""
    from llguidance import LLMatcher

    try:
        matcher = LLMatcher(tokenizer, lark_grammar(guide), log_level=0, limits=_limits())
    except ValueError as error:
        raise _refused(str(error)) from None
    if not matcher.is_error():
        # This finds grammars that no text follows, and its results serve every copy.
        matcher.compute_bitmask()
    if matcher.is_error():
        reason = _reason(matcher)
        if guide.json_schema is not None:
            root = json.loads(guide.json_schema)
            reason = located_reason(root, _PLACE.sub("", reason), partial(_refusal, tokenizer))
        raise _refused(reason if guide.lark is not None else _PLACE.sub("", reason))
    if warnings := matcher.get_grammar_warnings():
        raise _refused("; ".join(warnings))
    return matcher


def _refusal(tokenizer: LLTokenizer, schema: JsonObject) -> str:
    """Return the library's reason against a schema alone, empty if it has none."""
    from llguidance import LLMatcher

    text = f"start: %json {json.dumps(schema, ensure_ascii=False)}"
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=_limits())
    return _PLACE.sub("", _reason(matcher)) if matcher.is_error() else ""


def _with_large_stack(work: Callable[[], T]) -> T:
    """Return the result of `work`, run in a thread with a large stack.

    The library recurses as deep as references and rules lead, and a stack that is too small ends the process.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    with _STACK_LOCK:
        usual = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=run, name="compile a guide").start()
        finally:
            threading.stack_size(usual)
    return result.result()


def _refused(reason: str) -> RequestError:
    works = "anyOf works, or alternatives that differ in type or in a constant of a required property"
    return RequestError.of_parts([("guide", f" cannot be compiled: {reason.replace(_ONE_OF, works)}")])


def _reason(matcher: LLMatcher) -> str:
    """Return the reason why a matcher has failed, in the library's words."""
    said = _EXCERPT.split(matcher.get_error().replace("<non-verbose/>", ""))[0]
    reason = _AUTOMATON.sub("", " ".join(said.split()))
    for theirs, ours in _PLAIN.items():
        reason = reason.replace(theirs, ours)
    if reason == "NoExtensionBias":
        reason = "no text follows it"
    return reason if len(reason) <= _MAX_REASON else f"{reason[:100]} ... {reason[-_MAX_REASON + 100 :]}"


def _limits() -> LLParserLimits:
    """Return the limits of one grammar: some 25 MB for its automaton, and some ten milliseconds for a token."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_lexer_states=20_000,
        max_grammar_size=200_000,
        step_lexer_fuel=200_000,
        step_max_items=20_000,
        verbose_errors=False,
    )


class GrammarState:
    """Progress of one output within its grammar: a function of its tokens alone, updated at O(new tokens).

    `ahead` are tokens guessed after the output. Queries with them change nothing for queries without.
    """

    def __init__(self, grammar: Grammar, output_token_ids: Sequence[int]) -> None:
        """Start before `output_token_ids`, the request's growing list of tokens, which `allowed_mask` allowed."""
        self.grammar = grammar
        self._output = output_token_ids
        self._matcher: LLMatcher | None = None
        self._num_taken = 0
        """Output tokens that the matcher has taken."""
        self._beyond: tuple[int, ...] = ()
        """Tokens after those of the output that the matcher has taken."""
        self._allowed: dict[tuple[int, ...], bytes | None] = {}
        """Results of `allowed_mask` after the first `_num_known` tokens of output, by the tokens ahead of these."""
        self._num_known = 0
        self.error: str | None = None
        """Reason of the library, if the grammar became too much for it at this output."""

    def allowed_mask(self, ahead: tuple[int, ...] = ()) -> bytes | None:
        """Return the tokens that may follow, a bit each, lowest first: bit i % 8 of byte i // 8.

        None if nothing may: the grammar has ended, or does not allow `ahead`, or is too much for the library. Each mask
        is computed once, though a draft needs it when it is made and when it is verified.
        """
        if gained := tuple(self._output[self._num_known :]):
            num = len(gained)
            self._allowed = {key[num:]: mask for key, mask in self._allowed.items() if key[:num] == gained}
            self._num_known += num
        if ahead not in self._allowed:
            self._allowed[ahead] = self._query(ahead, _mask)
        return self._allowed[ahead]

    def ends_with(self, ahead: tuple[int, ...]) -> bool:
        """Return whether the grammar is complete with `ahead`, which it allows, so that nothing can follow.

        False after an end token, which ends the output itself.
        """
        return ahead[-1] not in self.grammar.eos_token_ids and self._query(ahead, _is_stopped, certain=True) is True

    def _query(self, ahead: tuple[int, ...], question: Callable[[LLMatcher], T], certain: bool = False) -> T | None:
        """Return the matcher's answer after the output and `ahead`; None if the matcher does not accept them.

        `certain`: `ahead` is known to be allowed.
        """
        if self.error is not None:
            return None
        reason = ""
        # An automaton grows with all queries of the matchers that share it. If it grew too large, a new one that sees
        # only this output may do.
        for start in (self.grammar.start, self.grammar.restart):
            if self._matcher is None:
                self._matcher, self._num_taken, self._beyond = start(), 0, ()
            matcher = self._matcher
            there = self._move(matcher, ahead)
            answer = question(matcher) if there else None
            lost = self._num_taken < len(self._output) or (certain and not there)
            if not (lost or matcher.is_error()):
                return answer
            reason, self._matcher = _reason(matcher), None
        if not ahead or certain:  # else the output may never contain `ahead`
            self.error = reason or "its automaton grows too large"
        return None

    def _move(self, matcher: LLMatcher, ahead: tuple[int, ...]) -> bool:
        """Advance the matcher to the end of the output and `ahead`; return whether it accepts them."""
        gained, beyond = tuple(self._output[self._num_taken :]), self._beyond
        target = (*gained, *ahead)
        common = 0
        while common < min(len(beyond), len(target)) and beyond[common] == target[common]:
            common += 1
        if common < len(beyond):
            matcher.rollback(len(beyond) - common)
        taken = common
        for place in range(common, len(target), _PIECE):
            if place > common:
                matcher.compute_bitmask()  # this begins a step, with new fuel
            piece = list(target[place : place + _PIECE])
            taken += (num := matcher.try_consume_tokens(piece))
            if num < len(piece):
                break
        if taken >= len(gained):
            self._num_taken += len(gained)
            self._beyond = target[len(gained) : taken]
        return taken == len(target)


def _mask(matcher: LLMatcher) -> bytes | None:
    return None if matcher.is_stopped() else matcher.compute_bitmask()


def _is_stopped(matcher: LLMatcher) -> bool:
    return matcher.is_stopped()


def located_reason(root: JsonMapping, reason: str, refusal: Callable[[JsonObject], str]) -> str:
    """Return the reason against a schema, with the place of the smallest part to which one applies alone.

    `refusal` returns the library's reason against a schema in its form, empty if it has none. Parts are tried one by
    one, for a bounded time.
    """
    rewriter, end, part = SchemaRewriter(root), time.thread_time() + _SEARCH_SECONDS, root
    place: Place = ()
    parts = list(_inner_schemas(root, root, reason))
    while parts and _empty_key(part) is None and time.thread_time() < end:
        keys, inner, fits = parts.pop(0)
        where = keys if "$ref" in part and keys[0] not in part else (*place, *keys)
        try:
            why = refusal(rewriter.document(inner, where))
        except ValueError:
            continue
        if why and (fits or why == reason):
            place, part, reason = where, inner, why
            parts = list(_inner_schemas(root, part, reason))
    empty = _empty_key(part)
    return f"{path((*place, empty))} has no entries, so no value follows it" if empty else f"{path(place)}: {reason}"


def _empty_key(schema: JsonMapping) -> str | None:
    return next((key for key in ("enum", "anyOf", "oneOf", "type") if schema.get(key) == []), None)


def _inner_schemas(root: object, schema: JsonMapping, reason: str) -> Iterator[tuple[Place, JsonMapping, bool]]:
    """Yield the parts of a schema that the library refused for a `reason`: keys, part, and whether any reason fits it.

    Otherwise only a part with the same reason is to blame: one that may be left out may be anything. Local references
    lead to keys of the `root`.
    """
    name, is_item = _REQUIRED_PROPERTY.search(reason), _REQUIRED_ITEM.search(reason) is not None
    for key in (*ONE_SCHEMA, *SCHEMA_LISTS, *NAMED_SCHEMAS):
        value = schema.get(key)
        if isinstance(value, Mapping) and key not in NAMED_SCHEMAS:
            yield (key,), value, is_item and key == "items"
        elif isinstance(value, Mapping | list):
            for inner_key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
                fits = is_item and key in ("items", "prefixItems")
                fits = fits or (name is not None and key == "properties" and inner_key == name[1])
                if isinstance(inner, Mapping):
                    yield (key, inner_key), inner, fits
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return
    if isinstance(inner := follow_pointer(root, reference[1:]), Mapping):
        yield tuple(reference[2:].split("/")), inner, True
