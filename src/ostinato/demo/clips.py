"""Clips: a few pictures of one shape that moves or stays in place, and their descriptions in words."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from PIL import Image

from .canvas import draw
from .scenes import Scene, arrange, describe, place

MOTIONS = {"to the left": (-1, 0), "to the right": (1, 0), "up": (0, -1), "down": (0, 1), "": (0, 0)}
"""Directions by their words in a clip's description; the last one is no motion."""
FRAME_COUNTS = (4, 6, 8)
TRAVEL = (0.30, 0.50)
SIDE = (96, 112)


@dataclass(frozen=True)
class Clip:
    """A clip: first picture, motion of its shape as shares of width and height, number of frames, and words."""

    start: Scene
    way: tuple[float, float]
    count: int
    motion: str

    @property
    def description(self) -> str:
        """The motion in words, such as `a red circle moves to the left`."""
        name = describe([self.start.shapes[0].name], "")
        return f"{name} moves {self.motion}" if self.motion else f"{name} stands still"

    @property
    def content(self) -> str:
        """The description that decides whether the clip is held out."""
        return self.description

    def frames(self) -> list[Image.Image]:
        """Draw the pictures, all of one size."""
        shape = self.start.shapes[0]
        shares = [index / (self.count - 1) for index in range(self.count)]
        moved = [replace(shape, x=shape.x + s * self.way[0], y=shape.y + s * self.way[1]) for s in shares]
        return [draw(replace(self.start, shapes=(shape,))) for shape in moved]


def draw_clip(rng: random.Random, name: str, motion: str) -> Clip:
    """Return a clip of the shape `name` with a motion of `MOTIONS`."""
    side = rng.randint(*SIDE)
    scene = arrange(rng, [name], place(0, 0))
    dx, dy = MOTIONS[motion]
    travel = rng.uniform(*TRAVEL)
    shape = scene.shapes[0]
    shape = replace(
        shape,
        radius=min(shape.radius, 0.22),
        x=0.5 - dx * travel / 2 + rng.uniform(-0.03, 0.03) if dx else rng.uniform(0.3, 0.7),
        y=0.5 - dy * travel / 2 + rng.uniform(-0.03, 0.03) if dy else rng.uniform(0.3, 0.7),
    )
    scene = replace(scene, width=side, height=side, shapes=(shape,))
    return Clip(scene, (dx * travel, dy * travel), rng.choice(FRAME_COUNTS), motion)
