"""Conversations about generated drawings: training and test data of the embedded vision-language model.

A drawing is known by its content: `a red circle above a blue square`, for a single shape also its place. Contents that
hash to a fixed residue are held out: training never draws them, evaluation no others.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from PIL import Image

from .asking import Question, ask, ask_describe, plain, word
from .canvas import MOTIONS, Clip, draw, draw_clip
from .scenes import Scene, arrange, content, draw_layout, draw_names

HELD_OUT_MODULUS = 8
SHAPE_COUNTS = {1: 3.0, 2: 5.0, 3: 2.0}
MAX_TURNS = 5


@dataclass(frozen=True)
class Source:
    """The wanted contents, and the share of scenes made of one shape, beyond those that have one anyway."""

    wanted: Callable[[str], bool]
    single: float = 0.0


@dataclass(frozen=True)
class DrawingTurn:
    """Pictures, or one clip, before a question, and the question with its answer."""

    shown: tuple[Scene | Clip, ...]
    question: Question

    def images(self) -> list[Image.Image]:
        """Draw the pictures that are shown; none for a clip."""
        return [draw(item) for item in self.shown if isinstance(item, Scene)]

    def frames(self) -> list[Image.Image]:
        """Draw the pictures of the clip that is shown, if there is one."""
        return [frame for item in self.shown if isinstance(item, Clip) for frame in item.frames()]


Conversation = tuple[DrawingTurn, ...]


def is_held_out(drawn: str) -> bool:
    """Return whether the content of a drawing is kept from training."""
    return zlib.crc32(drawn.encode()) % HELD_OUT_MODULUS == 0


def is_right(answer: str, turn: DrawingTurn) -> bool:
    """Return whether a generated answer is right; signs at its end and large letters do not matter."""
    return answer.strip().rstrip(".").lower() == turn.question.answer


def training_conversation(rng: random.Random, single: float = 0.0) -> Conversation:
    """Return a conversation about drawings that are not held out. `single` is as in `Source`."""
    family = rng.choices(list(FAMILIES), [weight for _, weight in FAMILIES.values()])[0]
    return FAMILIES[family][0](rng, Source(_for_training, single))


def training_scene(rng: random.Random) -> Scene:
    """Return a picture that is not held out."""
    return draw_scene(rng, Source(_for_training))


def _for_training(drawn: str) -> bool:
    return not is_held_out(drawn)


def held_out(seed: int, count: int, family: str = "question") -> list[Conversation]:
    """Return `count` conversations about drawings that training never saw, the same ones for the same seed."""
    rng = random.Random(f"held-out {family} {seed}")
    return [FAMILIES[family][0](rng, Source(is_held_out)) for _ in range(count)]


def draw_scene(rng: random.Random, source: Source) -> Scene:
    """Return a scene whose content is wanted."""
    while True:
        single = rng.random() < source.single
        count = 1 if single else rng.choices(list(SHAPE_COUNTS), list(SHAPE_COUNTS.values()))[0]
        names, layout = draw_names(rng, count), draw_layout(rng, count)
        if source.wanted(content(names, layout)):
            return arrange(rng, names, layout)


def _question(rng: random.Random, source: Source) -> Conversation:
    """Return one question about one picture, half of the time for its description."""
    scene = draw_scene(rng, source)
    question = ask_describe(rng, scene) if rng.random() < 0.5 else ask(rng, scene, set())
    return (DrawingTurn((scene,), question),)


def _talk(rng: random.Random, source: Source) -> Conversation:
    """Return several questions about one picture."""
    scene = draw_scene(rng, source)
    turns: list[DrawingTurn] = []
    asked: set[str] = set()
    for _ in range(rng.randint(2, MAX_TURNS)):
        question = ask(rng, scene, asked)
        asked.add(question.family)
        turns.append(DrawingTurn(() if turns else (scene,), question))
    return tuple(turns)


def _another(rng: random.Random, source: Source) -> Conversation:
    """Return questions about a picture, then about a second one."""
    first, second = draw_scene(rng, source), draw_scene(rng, source)
    turns = [DrawingTurn((first,), ask(rng, first, set()))]
    if rng.random() < 0.3:
        turns.append(DrawingTurn((), ask(rng, first, {turns[0].question.family})))
    turns.append(DrawingTurn((second,), plain(rng, "second", second.description)))
    if rng.random() < 0.3:
        turns.append(DrawingTurn((), ask(rng, second, {"describe"})))
    return tuple(turns)


def _two(rng: random.Random, source: Source) -> Conversation:
    """Return questions about two pictures at once: their descriptions, and whether they are the same."""
    first = draw_scene(rng, source)
    if rng.random() < 0.5:
        second = arrange(rng, [shape.name for shape in first.shapes], first.layout)
    else:
        second = draw_scene(rng, source)
    same = "yes" if first.description == second.description else "no"
    questions = [
        Question(word(rng, "first of two"), first.description, "first of two"),
        Question(word(rng, "second of two"), second.description, "second of two"),
        Question(word(rng, "same"), same, "same"),
    ]
    rng.shuffle(questions)
    shown: tuple[Scene, ...] = (first, second)
    turns = []
    for question in questions[: rng.randint(1, 3)]:
        turns.append(DrawingTurn(shown, question))
        shown = ()
    return tuple(turns)


def _clip(rng: random.Random, source: Source) -> Conversation:
    """Return a question about the motion in a clip."""
    while True:
        clip = draw_clip(rng, draw_names(rng, 1)[0], rng.choice(list(MOTIONS)))
        if source.wanted(clip.content):
            break
    turns = [DrawingTurn((clip,), plain(rng, "motion", clip.description))]
    shape = clip.start.shapes[0]
    if clip.motion and rng.random() < 0.4:
        turns.append(DrawingTurn((), plain(rng, "direction", clip.motion, rng.choice([shape.name, shape.kind]))))
    if rng.random() < 0.4:
        turns.append(DrawingTurn((), plain(rng, "colour", shape.colour, shape.kind)))
    return tuple(turns)


FAMILIES: dict[str, tuple[Callable[[random.Random, Source], Conversation], float]] = {
    "question": (_question, 4.0),
    "talk": (_talk, 6.0),
    "another": (_another, 0.8),
    "two": (_two, 0.8),
    "clip": (_clip, 0.8),
}
"""Families of conversations: a function that makes one, and how often it is in training."""
