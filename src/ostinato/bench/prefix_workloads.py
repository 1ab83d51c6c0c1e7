"""Workloads of the prefix benchmark: requests whose prompts share prefixes, also through the model's own answers.

A workload is a list of `PromptRequest`s, made from a seed. Their tokens are random, so two prompts share what the
workload specifies and nothing else, and every round uses tokens that were never seen before.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Sizes:
    """Sizes of the workloads. Lengths are in tokens."""

    shared_len: int
    """Length of a system prompt, a set of examples, or the context that all agents come from."""
    new_len: int
    """Mean length of a question, a message or a tail: they are half as long to half as long again."""
    output_len: int
    """Length of every answer."""
    sessions: int
    """Conversations or example sets at once, or agents that continue one context."""
    turns: int
    """Turns of a conversation; requests for each example set; levels of the tree of agents."""
    conversation_len: int
    """Length before the second turn in the workload `second-turn`: first prompt and answer together."""


@dataclass(frozen=True)
class Answer:
    """Tokens `begin` to `end` of the answer to ask number `of`."""

    of: int
    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin


Piece = tuple[int, ...] | Answer
"""A part of a prompt: token ids, or an answer of the model."""


@dataclass(frozen=True)
class PromptRequest:
    """One request: its prompt in pieces, and the length of its answer.

    It waits until ask number `after` is answered, and its pieces are answers to that one or to those it waited for.
    `role` is `counted` for the statistics; `setup` for later asks, not counted; `cold` for the prompt of another ask
    with nothing of it cached, to be compared with that one; `unmarked` for one without marks, to be compared with those
    that have some.
    """

    pieces: tuple[Piece, ...]
    output_len: int
    after: int | None = None
    role: Literal["counted", "setup", "cold", "unmarked"] = "counted"
    marks: tuple[int, ...] = ()
    """Positions that are pinned as checkpoints."""

    @property
    def prompt_len(self) -> int:
        return sum(map(len, self.pieces))

    def prompt(self, answers: Mapping[int, Sequence[int]]) -> list[int]:
        """Return the token ids; `answers` are by number of ask, and hold at least the one that it waited for."""
        tokens: list[int] = []
        for piece in self.pieces:
            tokens += answers[piece.of][piece.begin : piece.end] if isinstance(piece, Answer) else piece
        return tokens


@dataclass(frozen=True)
class Writer:
    """Source of random tokens for a workload."""

    rng: random.Random
    vocab_size: int

    def text(self, length: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(self.vocab_size) for _ in range(length))

    def about(self, length: int) -> tuple[int, ...]:
        """Return tokens, `length` of them on average."""
        return self.text(self.rng.randint(max(1, length // 2), length + length // 2))


def system(sizes: Sizes, writer: Writer) -> list[PromptRequest]:
    """Return many questions with one system prompt and nothing else in common."""
    prompt = writer.text(sizes.shared_len)
    count = sizes.sessions * sizes.turns
    return [PromptRequest((prompt, writer.about(sizes.new_len)), sizes.output_len) for _ in range(count)]


def chat(sizes: Sizes, writer: Writer) -> list[PromptRequest]:
    """Return conversations that alternate; all begin with the same system prompt.

    A prompt is all that was said before, the model's answers included, and a new message.
    """
    return _conversations(sizes, writer, thinking_len=0)


def thinking(sizes: Sizes, writer: Writer) -> list[PromptRequest]:
    """Return conversations as `chat`, but the template takes three quarters of an answer out of later prompts.

    These are thinking. So a prompt shares with the turn before that turn's prompt, and nothing of the answer.
    """
    return _conversations(sizes, writer, thinking_len=sizes.output_len * 3 // 4)


def few_shot(sizes: Sizes, writer: Writer) -> list[PromptRequest]:
    """Return requests for sets of examples, alternating, with tails of many lengths."""
    examples = [writer.text(sizes.shared_len) for _ in range(sizes.sessions)]
    return [
        PromptRequest((example, writer.about(sizes.new_len)), sizes.output_len)
        for _ in range(sizes.turns)
        for example in examples
    ]


def agents(sizes: Sizes, writer: Writer) -> list[PromptRequest]:
    """Return a tree of contexts.

    In each level two agents are selected, and their contexts (prompt and answer) are cut at a point inside what they
    added. Agents of the next level continue from there with their own messages.
    """
    root = PromptRequest((writer.text(sizes.shared_len), writer.about(sizes.new_len)), sizes.output_len)
    asks, inherited = [root], [sizes.shared_len]
    level = [0]
    for _ in range(sizes.turns - 1):
        cuts = []
        for parent in writer.rng.sample(level, min(2, len(level))):
            context = (*asks[parent].pieces, Answer(parent, 0, asks[parent].output_len))
            point = writer.rng.randrange(inherited[parent] + 1, sum(map(len, context)))
            cuts.append((parent, tuple(cut(context, point)), point))
        level = list(range(len(asks), len(asks) + sizes.sessions))
        for number in range(sizes.sessions):
            parent, pieces, point = cuts[number % len(cuts)]
            asks.append(PromptRequest((*pieces, writer.about(sizes.new_len)), sizes.output_len, after=parent))
            inherited.append(point)
    return asks


def second_turn(sizes: Sizes, writer: Writer) -> list[PromptRequest]:
    """Return a conversation of `conversation_len` tokens, then its second turn, cached and not, in random order."""
    output_len = min(sizes.output_len, sizes.conversation_len - 1)
    first = PromptRequest((writer.text(sizes.conversation_len - output_len),), output_len, role="setup")
    pieces = (*first.pieces, Answer(0, 0, output_len), writer.text(sizes.new_len))
    # Each ask waits for the one before it, so that both run alone.
    roles: list[Literal["counted", "cold"]] = ["counted", "cold"]
    writer.rng.shuffle(roles)
    return [first, *(PromptRequest(pieces, 1, after=number, role=role) for number, role in enumerate(roles))]


def rewritten_history(sizes: Sizes, writer: Writer) -> list[PromptRequest]:
    """Return pairs of conversations whose end an agent rewrites, one with a mark after what stays, one without.

    A first prompt is what stays, about `conversation_len` tokens, and a text that the agent edits, such as reasoning or
    a tool's result. The second has what stays and the edited text. All prompts run alone.
    """
    asks: list[PromptRequest] = []
    for _ in range(sizes.turns):
        length = writer.rng.randint(max(1, sizes.conversation_len * 3 // 4), sizes.conversation_len)
        for marked in writer.rng.sample((False, True), 2):
            lasting, marks = writer.text(length), (length,) if marked else ()
            role: Literal["counted", "unmarked"] = "counted" if marked else "unmarked"
            before = len(asks) - 1 if asks else None
            edited = (lasting, writer.text(2 * sizes.new_len)), (lasting, writer.text(sizes.new_len))
            asks.append(PromptRequest(edited[0], sizes.output_len, before, role="setup", marks=marks))
            asks.append(PromptRequest(edited[1], 1, len(asks) - 1, role, marks))
    return asks


WORKLOADS = {
    "system": system,
    "chat": chat,
    "thinking": thinking,
    "few-shot": few_shot,
    "agents": agents,
    "second-turn": second_turn,
    "rewritten-history": rewritten_history,
}


def make_asks(name: str, sizes: Sizes, vocab_size: int, number: int) -> list[PromptRequest]:
    """Return the asks of workload `name` in round `number`: other tokens in each round, the same in every run."""
    return WORKLOADS[name](sizes, Writer(random.Random(f"{name} {number}"), vocab_size))


def cut(pieces: Sequence[Piece], length: int) -> Iterator[Piece]:
    """Yield the first `length` tokens of `pieces`, in pieces."""
    for piece in pieces:
        if length <= 0:
            return
        if isinstance(piece, Answer):
            yield Answer(piece.of, piece.begin, min(piece.end, piece.begin + length))
        else:
            yield piece[:length]
        length -= len(piece)


def _conversations(sizes: Sizes, writer: Writer, thinking_len: int) -> list[PromptRequest]:
    """Return one ask of every conversation in each turn, turn by turn.

    Answers lose their first `thinking_len` tokens once they are part of a prompt.
    """
    system_prompt = writer.text(sizes.shared_len)
    asks: list[PromptRequest] = []
    for turn in range(sizes.turns):
        for _ in range(sizes.sessions):
            before: tuple[Piece, ...] = (system_prompt,)
            after = None
            if turn > 0:
                after = len(asks) - sizes.sessions
                before = (*asks[after].pieces, Answer(after, thinking_len, sizes.output_len))
            asks.append(PromptRequest((*before, writer.about(sizes.new_len)), sizes.output_len, after))
    return asks
