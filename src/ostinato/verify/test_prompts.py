"""Prompts for verification: their sources, lengths, shared prefixes and second turns. Imports no torch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ostinato.config import EngineConfig
from ostinato.demo.problems import held_out
from ostinato.engine.text.chat_template import ChatTemplate
from ostinato.engine.text.tokenizer import Tokenizer, load_tokenizer_and_template
from ostinato.errors import RequestError
from ostinato.media.media_item import MediaItem
from ostinato.media.media_prompt import MediaPlacement, MediaPrompt, positions_of
from ostinato.models.checkpoint import checkpoint_of
from ostinato.plan.layer_specs import VisionSpec
from ostinato.plan.model import ModelSpec

NUM_EXAMPLES = 24
"""Word problems with their answers in the text that prompts are cut from."""
NUM_TOKENS = 4096
"""Tokens of a random text."""
NUM_WORDS = 48
"""Distinct tokens of a random text: few, so that it repeats itself and prompt lookup finds something."""
SHORTEST, LONGEST = 5, 160
"""Least and most tokens of a random prompt."""


@dataclass(frozen=True)
class PromptTexts:
    """Tokens that prompts are cut from, and whole prompts. `ends`: an end token among them ends an output."""

    text: tuple[int, ...]
    others: tuple[tuple[int, ...], ...]
    ends: bool


def make_texts(
    config: EngineConfig, model: ModelSpec, lines: Sequence[str], num_prompts: int, seed: int
) -> PromptTexts:
    """Return `lines` as prompts if there are any, else `num_prompts` generated ones.

    These are word problems for the embedded model, and random prompts for others. RequestError if there are lines and
    the checkpoint has no tokenizer.
    """
    if not lines and config.model != "demo":
        return _random(model, num_prompts, seed)
    tokenizer, template = load_tokenizer_and_template(config, checkpoint_of(config))
    if lines:
        others = [_question(line, tokenizer, template) for line in lines]
        return PromptTexts(tuple(token for other in others for token in other), tuple(others), ends=True)
    problems = held_out(seed, NUM_EXAMPLES + num_prompts)
    examples = [
        {"role": role, "content": text}
        for problem in problems[num_prompts:]
        for role, text in (("user", problem.question), ("assistant", problem.answer))
    ]
    text = tokenizer.encode(template.render(examples, add_generation_prompt=False), add_special_tokens=False)
    return PromptTexts(
        tuple(text),
        tuple(_question(problem.question, tokenizer, template) for problem in problems[:num_prompts]),
        ends=True,
    )


def _question(text: str, tokenizer: Tokenizer, template: ChatTemplate) -> tuple[int, ...]:
    """Return a prompt as a user's message, or unchanged if the checkpoint has no chat template."""
    if template.has_default:
        rendered = template.render([{"role": "user", "content": text}])
        token_ids = tokenizer.encode(rendered, add_special_tokens=False)
    else:
        token_ids = tokenizer.encode(text)
    if not token_ids:
        raise RequestError(f"the prompt {text!r} has no tokens; leave it out")
    return tuple(token_ids)


def _random(model: ModelSpec, num_prompts: int, seed: int) -> PromptTexts:
    rng = random.Random(f"verify {seed}")
    vision = model.vision
    placeholders = set() if vision is None else {vision.image_token_id, vision.video_token_id}
    words = rng.sample(range(model.vocab_size), min(model.vocab_size, NUM_WORDS))
    words = [word for word in words if word not in placeholders]
    others = [tuple(rng.choices(words, k=rng.randint(SHORTEST, LONGEST))) for _ in range(num_prompts)]
    return PromptTexts(tuple(rng.choices(words, k=NUM_TOKENS)), tuple(others), ends=False)


TURN_TOKENS = 9
"""Tokens of a second turn that ends anywhere."""
STOPS = (6, 7)
"""Places of the tokens that end stopped outputs.

Drafts of 2, 3 and 4 tokens, if they are right, go on behind one of the two.
"""
IMAGES = ((2, 3), (4, 4))
"""Height and width of images, in tokens."""


@dataclass(frozen=True)
class Prompt:
    """One prompt, perhaps a second turn.

    It follows the text of prompt `after`, the output included. With `ends_block` it has only as many of its own tokens
    as end at a block boundary, else all of them. If it is `salted`, its cache entries serve no other first turn. Its
    output ends at the token `stop_at`, as if a stop string ended there; later turns go on as if it had not.
    """

    about: str
    tokens: tuple[int, ...]
    after: int | None = None
    ends_block: bool = False
    salted: bool = False
    stop_at: int | None = None
    media: MediaPrompt | None = None

    def whole(self, before: Sequence[int], block_size: int) -> list[int]:
        """Return all tokens, including those of the turn before."""
        if not self.ends_block:
            return [*before, *self.tokens]
        return [*before, *self.tokens[: -len(before) % block_size or block_size]]


def make_prompts(
    text: Sequence[int],
    others: Sequence[Sequence[int]],
    block_size: int,
    state_block_size: int,
    chunks: Sequence[int],
    vision: VisionSpec | None = None,
) -> list[Prompt]:
    """Make prompts of every kind of length from `text`, and of `others` unchanged; with images for an encoder.

    `text` repeats where it ends. All first turns come first, then the second ones. Some share a prefix that ends inside
    a block. They end at block boundaries and boundaries of checkpoints, just behind one, and off them; and at
    boundaries of chunks, where several small `chunks` split them.
    """
    pieces = _Pieces(text)
    shared = pieces.next(state_block_size + block_size // 2 + 1)
    long = 3 * state_block_size

    def sharing(length: int) -> tuple[int, ...]:
        return shared + pieces.next(length - len(shared))

    first = [
        Prompt("shorter than a block", pieces.next(max(1, block_size // 2 - 1))),
        Prompt("shared prefix, ends at a checkpoint", sharing(long)),
        Prompt("shared prefix, one token behind a block", sharing(long - block_size + 1)),
        Prompt("shared prefix, ends inside a block", sharing(long + block_size // 3)),
    ]
    for chunk in chunks:
        length = -(-(2 * state_block_size + 1) // chunk) * chunk
        first.append(Prompt(f"ends where a chunk of {chunk} does", pieces.next(length)))
    first += [Prompt("as it is", tuple(other)) for other in others]
    second = [
        Prompt("second turn, ends at a block", pieces.next(block_size), after=3, ends_block=True),
        Prompt("second turn, short", pieces.next(TURN_TOKENS), after=0),
    ]
    if others:
        second.append(Prompt("second turn", pieces.next(TURN_TOKENS), after=len(first) - 1))
    for stop_at in STOPS:
        second.append(Prompt("second turn behind a stop", pieces.next(TURN_TOKENS), after=len(first)))
        # All tokens before the last are computed when the output ends, and end at a block.
        about = f"salted, shared prefix, stopped at token {stop_at}"
        first.append(Prompt(about, sharing(long - stop_at), salted=True, stop_at=stop_at))
    if vision is not None:
        second.append(Prompt("second turn behind images", pieces.next(TURN_TOKENS), after=len(first)))
        parts = [pieces.next(length) for length in (block_size + 3, 2 * block_size, 5)]
        first += [_with_images(parts, seeds, vision) for seeds in ((0, 1), (0, 3))]
    return first + second


def _with_images(parts: Sequence[tuple[int, ...]], seeds: Sequence[int], vision: VisionSpec) -> Prompt:
    """Return a prompt of text with an image of noise behind each part but the last."""
    tokens, placed, merge = [*parts[0]], list[MediaPlacement](), vision.merge_size
    for seed, part in zip(seeds, parts[1:], strict=True):
        rows, columns = IMAGES[seed % len(IMAGES)]
        shape = (rows * columns * merge**2, vision.patch_elements)
        patches = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
        item = MediaItem(patches, (rows * merge, columns * merge), rows * columns, f"noise {seed}")
        tokens += [] if vision.start_token_id is None else [vision.start_token_id]
        placed.append(MediaPlacement(len(tokens), len(tokens) + item.num_tokens, item))
        tokens += [vision.image_token_id] * item.num_tokens
        tokens += part if vision.end_token_id is None else (vision.end_token_id, *part)
    media = MediaPrompt(tokens, tuple(placed), positions_of(tokens, placed, vision))
    return Prompt("with images", tuple(tokens), media=media)


def longest_text(prompts: Sequence[Prompt], max_tokens: int) -> int:
    """Return the most tokens of a prompt with its output of at most `max_tokens`, those of the turn before included."""
    lengths: list[int] = []
    for prompt in prompts:
        before = 0 if prompt.after is None else lengths[prompt.after]
        lengths.append(before + len(prompt.tokens) + max_tokens)
    return max(lengths)


class _Pieces:
    """Source of pieces, cut from a text one after another."""

    def __init__(self, text: Sequence[int]) -> None:
        self._text = text
        self._place = 0

    def next(self, length: int) -> tuple[int, ...]:
        place, text = self._place, self._text
        self._place += length
        return tuple(text[i % len(text)] for i in range(place, place + length))
