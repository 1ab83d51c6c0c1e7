"""What the prefix benchmark asks: requests whose prompts share beginnings, also through the model's own answers.

A workload is a list of `Ask`s, made from a seed. Their texts are random token ids, so two prompts share what the
workload says and nothing else, and every round asks with tokens that were never seen before.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Sizes:
    """How large the workloads are. Lengths are in tokens."""

    shared_len: int
    """Of a system prompt, a set of examples, or the context that all agents come from."""
    new_len: int
    """Of a question, a message or a tail, on average: they are half as long to half as long again."""
    output_len: int
    """Of an answer, always."""
    sessions: int
    """Conversations or example sets at once, or agents that continue one context."""
    turns: int
    """Of a conversation; requests for each example set; levels of the tree of agents."""
    conversation_len: int
    """Of what precedes the second turn in the workload `second-turn`: first prompt and answer together."""


@dataclass(frozen=True)
class Answer:
    """Tokens `begin` to `end` of the answer to ask number `of`."""

    of: int
    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin


Piece = tuple[int, ...] | Answer
"""A part of a prompt: token ids, or what the model said."""


@dataclass(frozen=True)
class Ask:
    """One request: its prompt in pieces, and how many tokens it is answered with.

    It waits until ask number `after` is answered, and its pieces are answers to that one or to those it waited for.
    `role` says what it is for: `counted` in the figures; `setup` for later asks, not counted; `cold` asks what
    another one asks with nothing of it cached, to be compared with that one.
    """

    pieces: tuple[Piece, ...]
    output_len: int
    after: int | None = None
    role: Literal["counted", "setup", "cold"] = "counted"

    @property
    def prompt_len(self) -> int:
        return sum(map(len, self.pieces))

    def prompt(self, answers: Mapping[int, Sequence[int]]) -> list[int]:
        """The token ids; `answers` are by number of ask, and hold at least the one that it waited for."""
        tokens: list[int] = []
        for piece in self.pieces:
            tokens += answers[piece.of][piece.begin : piece.end] if isinstance(piece, Answer) else piece
        return tokens


@dataclass(frozen=True)
class Writer:
    """Writes random texts for a workload."""

    rng: random.Random
    vocab_size: int

    def text(self, length: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(self.vocab_size) for _ in range(length))

    def about(self, length: int) -> tuple[int, ...]:
        """A text of `length` tokens on average."""
        return self.text(self.rng.randint(max(1, length // 2), length + length // 2))


def system(sizes: Sizes, writer: Writer) -> list[Ask]:
    """One system prompt, and many questions that have nothing else in common."""
    prompt = writer.text(sizes.shared_len)
    count = sizes.sessions * sizes.turns
    return [Ask((prompt, writer.about(sizes.new_len)), sizes.output_len) for _ in range(count)]


def chat(sizes: Sizes, writer: Writer) -> list[Ask]:
    """Conversations that take turns: a prompt is all that was said before, the model's answers included, and a
    new message. All begin with the same system prompt."""
    return _conversations(sizes, writer, thinking_len=0)


def thinking(sizes: Sizes, writer: Writer) -> list[Ask]:
    """As `chat`, but three quarters of an answer are thinking, which the template takes out of later prompts. So a
    prompt shares with the turn before that turn's prompt, and nothing of the answer."""
    return _conversations(sizes, writer, thinking_len=sizes.output_len * 3 // 4)


def few_shot(sizes: Sizes, writer: Writer) -> list[Ask]:
    """Sets of examples in turns, each asked with tails of many lengths."""
    examples = [writer.text(sizes.shared_len) for _ in range(sizes.sessions)]
    return [Ask((each, writer.about(sizes.new_len)), sizes.output_len) for _ in range(sizes.turns) for each in examples]


def agents(sizes: Sizes, writer: Writer) -> list[Ask]:
    """A tree of contexts. In each level two agents are chosen, their contexts (prompt and answer) cut at a point
    inside what they added, and agents of the next level go on from there with messages of their own."""
    root = Ask((writer.text(sizes.shared_len), writer.about(sizes.new_len)), sizes.output_len)
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
            asks.append(Ask((*pieces, writer.about(sizes.new_len)), sizes.output_len, after=parent))
            inherited.append(point)
    return asks


def second_turn(sizes: Sizes, writer: Writer) -> list[Ask]:
    """One conversation of `conversation_len` tokens, then its second turn's prompt twice, once with the
    conversation cached and once without; which of them comes first is drawn."""
    output_len = min(sizes.output_len, sizes.conversation_len - 1)
    first = Ask((writer.text(sizes.conversation_len - output_len),), output_len, role="setup")
    pieces = (*first.pieces, Answer(0, 0, output_len), writer.text(sizes.new_len))
    # Each waits for the ask before it, so that both run alone.
    roles: list[Literal["counted", "cold"]] = ["counted", "cold"]
    writer.rng.shuffle(roles)
    return [first, *(Ask(pieces, 1, after=number, role=role) for number, role in enumerate(roles))]


WORKLOADS = {
    "system": system,
    "chat": chat,
    "thinking": thinking,
    "few-shot": few_shot,
    "agents": agents,
    "second-turn": second_turn,
}


def make_asks(name: str, sizes: Sizes, vocab_size: int, number: int) -> list[Ask]:
    """The asks of workload `name` in round `number`: other tokens in each round, the same in every run."""
    return WORKLOADS[name](sizes, Writer(random.Random(f"{name} {number}"), vocab_size))


def cut(pieces: Sequence[Piece], length: int) -> Iterator[Piece]:
    """The first `length` tokens of `pieces`, in pieces."""
    for piece in pieces:
        if length <= 0:
            return
        if isinstance(piece, Answer):
            yield Answer(piece.of, piece.begin, min(piece.end, piece.begin + length))
        else:
            yield piece[:length]
        length -= len(piece)


def _conversations(sizes: Sizes, writer: Writer, thinking_len: int) -> list[Ask]:
    """Turn by turn, in each turn one ask of every conversation; answers lose their first `thinking_len` tokens
    once they are part of a prompt."""
    system_prompt = writer.text(sizes.shared_len)
    asks: list[Ask] = []
    for turn in range(sizes.turns):
        for _ in range(sizes.sessions):
            before: tuple[Piece, ...] = (system_prompt,)
            after = None
            if turn > 0:
                after = len(asks) - sizes.sessions
                before = (*asks[after].pieces, Answer(after, thinking_len, sizes.output_len))
            asks.append(Ask((*before, writer.about(sizes.new_len)), sizes.output_len, after))
    return asks
