"""Questions about scenes, pairs of pictures and clips, each in several wordings, and the one right answer."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from .scenes import COLOURS, INVERSE, KINDS, NUMBERS, Scene, Shape, describe

WORDINGS: dict[str, tuple[str, ...]] = {
    "describe": (
        "What is in the picture?",
        "What is in the picture?",
        "What is in this picture?",
        "What is in the image?",
        "What is in this image?",
        "What do you see?",
        "What can you see?",
        "What is this?",
        "What does the picture show?",
        "What does this image show?",
        "Describe the picture.",
        "Describe the image.",
        "Describe this image.",
    ),
    "count": (
        "How many shapes are there?",
        "How many shapes are in the picture?",
        "How many shapes do you see?",
        "Count the shapes.",
    ),
    "colour": (
        "What colour is the {}?",
        "What color is the {}?",
        "Which colour is the {}?",
        "Which color does the {} have?",
        "What is the colour of the {}?",
    ),
    "kind": ("What shape is {}?", "Which shape is {}?", "What is {}?", "What is the {} shape?"),
    "where": ("Where is the {}?", "Where is the {} in the picture?", "Where do you see the {}?"),
    "exists": ("Is there {}?", "Is there {} in the picture?", "Do you see {}?", "Does the picture show {}?"),
    "background": (
        "What colour is the background?",
        "What color is the background?",
        "Which colour does the background have?",
        "What is the background?",
    ),
    "bigger": ("Which shape is bigger?", "Which is bigger?", "Which one is larger?", "What is the largest shape?"),
    "relation": ("Is the {} {} the {}?",),
    "which": ("What is {} the {}?", "Which shape is {} the {}?"),
    "second": ("What is in this one?", "And in this one?", "And what is in this picture?", "What is in this picture?"),
    "first of two": ("What is in the first picture?", "What is in the first image?", "Describe the first picture."),
    "second of two": ("What is in the second picture?", "What is in the second image?", "Describe the second picture."),
    "same": (
        "Are the pictures the same?",
        "Are the two pictures the same?",
        "Do both pictures show the same?",
        "Do the images show the same?",
        "Same or different?",
    ),
    "motion": (
        "What happens?",
        "What happens in the video?",
        "What do you see?",
        "What is in the video?",
        "Describe the video.",
    ),
    "direction": ("Where does the {} move?", "How does the {} move?", "In which direction does the {} move?"),
}
BIGGER_BY = 1.3
CARELESS = 0.06
_TRIES = 100


@dataclass(frozen=True)
class Question:
    """A question, its answer, and the key of its wording in `WORDINGS`."""

    text: str
    answer: str
    family: str


def word(rng: random.Random, family: str, *names: str) -> str:
    """Return the question in one of its wordings, now and then in lower case or without its last sign."""
    text = rng.choice(WORDINGS[family]).format(*names)
    if rng.random() < CARELESS:
        text = text.lower()
    return text[:-1] if rng.random() < CARELESS else text


def plain(rng: random.Random, family: str, answer: str, *names: str) -> Question:
    return Question(word(rng, family, *names), answer, family)


def ask(rng: random.Random, scene: Scene, asked: set[str]) -> Question:
    """Return a question about the scene, of a family that was not asked before if one is left that fits the scene."""
    families = [family for family in SCENE_FAMILIES if family not in asked] or list(SCENE_FAMILIES)
    weights = [SCENE_FAMILIES[family][1] for family in families]
    for _ in range(_TRIES):
        family = rng.choices(families, weights)[0]
        question = SCENE_FAMILIES[family][0](rng, scene)
        if question is not None:
            return question
    return ask_describe(rng, scene)


def ask_describe(rng: random.Random, scene: Scene) -> Question:
    """Ask for a description of the picture."""
    return plain(rng, "describe", scene.description)


def _colour(rng: random.Random, scene: Scene) -> Question | None:
    shape = rng.choice(scene.shapes)
    if sum(other.kind == shape.kind for other in scene.shapes) > 1:
        return None
    return plain(rng, "colour", shape.colour, shape.kind)


def _kind(rng: random.Random, scene: Scene) -> Question | None:
    shape = rng.choice(scene.shapes)
    if sum(other.colour == shape.colour for other in scene.shapes) > 1:
        return None
    return plain(rng, "kind", describe([shape.kind], ""), shape.colour)


def _where(rng: random.Random, scene: Scene) -> Question:
    """Ask for the place of a shape.

    For a single shape it is the place in the picture; for several, the relation to the shape before it, or for the
    first one to the shape after it.
    """
    index = rng.randrange(len(scene.shapes))
    shape = scene.shapes[index]
    if len(scene.shapes) == 1:
        return plain(rng, "where", scene.layout, _called(rng, scene, shape))
    if index:
        answer = f"{INVERSE[scene.layout]} the {scene.shapes[index - 1].name}"
    else:
        answer = f"{scene.layout} the {scene.shapes[1].name}"
    return plain(rng, "where", answer, _called(rng, scene, shape))


def _exists(rng: random.Random, scene: Scene) -> Question:
    """Ask whether a shape is in the picture. If it is not, its colour or its kind is there."""
    names = {shape.name for shape in scene.shapes}
    name = rng.choice(sorted(names))
    if rng.random() < 0.5:
        return plain(rng, "exists", "yes", describe([name], ""))
    while name in names:
        colour, kind = name.split()
        name = f"{rng.choice(COLOURS)} {kind}" if rng.random() < 0.5 else f"{colour} {rng.choice(KINDS)}"
    return plain(rng, "exists", "no", describe([name], ""))


def _bigger(rng: random.Random, scene: Scene) -> Question | None:
    largest = sorted(scene.shapes, key=lambda shape: shape.radius, reverse=True)
    if len(largest) != 2 or largest[0].radius < BIGGER_BY * largest[1].radius:
        return None
    return plain(rng, "bigger", f"the {largest[0].name}")


def _relation(rng: random.Random, scene: Scene) -> Question | None:
    """Ask whether two neighbours are in a relation."""
    if len(scene.shapes) < 2:
        return None
    index = rng.randrange(len(scene.shapes) - 1)
    shapes, relation = list(scene.shapes[index : index + 2]), scene.layout
    if rng.random() < 0.5:
        shapes, relation = shapes[::-1], INVERSE[relation]
    answer = "yes"
    if rng.random() < 0.5:
        relation, answer = INVERSE[relation], "no"
    first, second = (_called(rng, scene, shape) for shape in shapes)
    return plain(rng, "relation", answer, first, relation, second)


def _which(rng: random.Random, scene: Scene) -> Question | None:
    """Ask for the shape that is in a relation to the other of two shapes."""
    if len(scene.shapes) != 2:
        return None
    shapes, relation = scene.shapes, scene.layout
    if rng.random() < 0.5:
        shapes, relation = shapes[::-1], INVERSE[relation]
    return plain(rng, "which", describe([shapes[0].name], ""), relation, _called(rng, scene, shapes[1]))


def _called(rng: random.Random, scene: Scene, shape: Shape) -> str:
    """Return a shape's name, or its kind alone if no other shape is of that kind."""
    alone = sum(other.kind == shape.kind for other in scene.shapes) == 1
    return shape.kind if alone and rng.random() < 0.4 else shape.name


SCENE_FAMILIES: dict[str, tuple[Callable[[random.Random, Scene], Question | None], float]] = {
    "describe": (ask_describe, 3.0),
    "count": (lambda rng, scene: plain(rng, "count", NUMBERS[len(scene.shapes)]), 0.7),
    "colour": (_colour, 1.5),
    "kind": (_kind, 1.5),
    "where": (_where, 1.5),
    "exists": (_exists, 1.5),
    "background": (lambda rng, scene: plain(rng, "background", scene.background), 0.5),
    "bigger": (_bigger, 0.7),
    "relation": (_relation, 1.0),
    "which": (_which, 1.0),
}
"""Families of questions: a function that makes a question if the scene allows one, and how often it is asked."""
