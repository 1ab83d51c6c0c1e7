"""Scenes of one to three shapes: contents, positions, and descriptions in words.

Lengths are shares of the picture's shorter side, positions shares of its width and height, y downwards.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

KINDS = ("circle", "square", "triangle", "star", "cross")
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink")
BACKGROUNDS = ("white", "grey", "black")
NUMBERS = ("no", "one", "two", "three")
RELATIONS = ("above", "left of")
"""Relations of the first shape of a pair to the second. A description names the upper or left shape first."""
INVERSE = {"above": "below", "left of": "right of", "below": "above", "right of": "left of"}

SHORTEST, LONGEST = 80, 176
LARGEST_ASPECT = 1.8
ENLARGED = 0.15
MIN_GAP = 1.08
PLACE_OFFSET, PLACE_SLACK = 0.24, 0.05


@dataclass(frozen=True)
class Shape:
    """A shape: kind, colour, centre, radius of the circle around it, and its rotation in degrees."""

    kind: str
    colour: str
    x: float
    y: float
    radius: float
    turned: float

    @property
    def name(self) -> str:
        """Colour and kind, such as `red circle`."""
        return f"{self.colour} {self.kind}"


@dataclass(frozen=True)
class Scene:
    """A picture to draw: its size in pixels, background, shapes, and their layout.

    `layout` is the place of a single shape, else the relation of each shape to the next. `grain` seeds all that has no
    name: shades and noise.
    """

    width: int
    height: int
    background: str
    shapes: tuple[Shape, ...]
    layout: str
    grain: int

    @property
    def description(self) -> str:
        """The picture in words, such as `a red circle above a blue square`."""
        return describe([shape.name for shape in self.shapes], self.layout)

    @property
    def content(self) -> str:
        """The content that decides whether the picture is held out, such as `a red circle at the top left`."""
        return content([shape.name for shape in self.shapes], self.layout)


def content(names: list[str], layout: str) -> str:
    """Return the content that identifies a drawing: its description, and the place of a single shape."""
    return describe(names, layout) if len(names) > 1 else f"{describe(names, layout)} {layout}"


def describe(names: list[str], layout: str) -> str:
    """Describe one to three shapes by their names, in order, and the relation between neighbours."""
    if len(names) == 1:
        return f"a {names[0]}" if names[0][0] not in "aeiou" else f"an {names[0]}"
    return f" {layout} ".join(describe([name], "") for name in names)


def draw_names(rng: random.Random, count: int) -> list[str]:
    """Draw the names of `count` different shapes."""
    names: list[str] = []
    while len(names) < count:
        name = f"{rng.choice(COLOURS)} {rng.choice(KINDS)}"
        if name not in names:
            names.append(name)
    return names


def draw_layout(rng: random.Random, count: int) -> str:
    """Draw the place of a single shape, or the relation between several."""
    if count > 1:
        return rng.choice(RELATIONS)
    return place(rng.randint(-1, 1), rng.randint(-1, 1))


def place(column: int, row: int) -> str:
    """Return the words for one of nine places; -1 is left and top, 1 right and bottom."""
    horizontal, vertical = ("left", "", "right")[column + 1], ("top", "", "bottom")[row + 1]
    if not row:
        return f"on the {horizontal}" if column else "in the middle"
    return f"at the {vertical} {horizontal}".rstrip()


PLACES = {place(column, row): (column, row) for column in (-1, 0, 1) for row in (-1, 0, 1)}


def draw_size(rng: random.Random) -> tuple[int, int]:
    """Draw width and height of a picture in pixels; some are several times as large as most."""
    while True:
        width, height = rng.randint(SHORTEST, LONGEST), rng.randint(SHORTEST, LONGEST)
        if max(width, height) <= LARGEST_ASPECT * min(width, height):
            break
    scale = rng.uniform(1.5, 4.0) if rng.random() < ENLARGED else 1.0
    return round(width * scale), round(height * scale)


def arrange(rng: random.Random, names: list[str], layout: str) -> Scene:
    """Return a scene of these shapes with this layout, drawn at random otherwise."""
    width, height = draw_size(rng)
    short = min(width, height)
    while True:
        largest = {1: 0.26, 2: 0.21, 3: 0.145}[len(names)]
        radii = [rng.uniform(max(0.12, 0.6 * largest), largest) for _ in names]
        if len(names) == 1:
            column, row = PLACES[layout]
            points = [(_near(rng, column), _near(rng, row))]
        else:
            points = [(_inside(rng, r * short / width), _inside(rng, r * short / height)) for r in radii]
            points.sort(key=lambda point: point[1 if layout == "above" else 0])
        if _clear(points, radii, layout, width / short, height / short):
            break
    shapes = []
    for name, (x, y), radius in zip(names, points, radii, strict=True):
        colour, kind = name.split()
        shapes.append(Shape(kind, colour, x, y, radius, rng.uniform(-12, 12)))
    return Scene(width, height, rng.choice(BACKGROUNDS), tuple(shapes), layout, rng.getrandbits(32))


def _inside(rng: random.Random, margin: float) -> float:
    return rng.uniform(margin, 1 - margin)


def _near(rng: random.Random, step: int) -> float:
    return 0.5 + PLACE_OFFSET * step + rng.uniform(-PLACE_SLACK, PLACE_SLACK)


def _clear(points: list[tuple[float, float]], radii: list[float], layout: str, wide: float, high: float) -> bool:
    """Return whether all shapes are inside the picture and apart, and neighbours clearly fit the layout."""
    for (x, y), radius in zip(points, radii, strict=True):
        if not (radius <= x * wide <= wide - radius and radius <= y * high <= high - radius):
            return False
    for (first, r), (second, other) in zip(
        zip(points, radii, strict=True), list(zip(points, radii, strict=True))[1:], strict=False
    ):
        dx, dy = (second[0] - first[0]) * wide, (second[1] - first[1]) * high
        along, across = (dy, dx) if layout == "above" else (dx, dy)
        if along < 1.8 * abs(across) or math.hypot(dx, dy) < MIN_GAP * (r + other):
            return False
    return True
