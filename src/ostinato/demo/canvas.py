"""Scenes as pictures, and as clips in which a shape moves."""

from __future__ import annotations

import colorsys
import math
import random
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image, ImageDraw

from .scenes import Scene, Shape, arrange, describe, place

# Hue in degrees, saturation and value, each as a range. A colour's name covers pure to pale shades.
SHADES: dict[str, tuple[tuple[int, int], tuple[float, float], tuple[float, float]]] = {
    "red": ((-6, 5), (0.80, 1.0), (0.75, 1.0)),
    "orange": ((26, 39), (0.85, 1.0), (0.92, 1.0)),
    "yellow": ((53, 61), (0.75, 1.0), (0.90, 1.0)),
    "green": ((105, 145), (0.70, 1.0), (0.45, 1.0)),
    "blue": ((212, 242), (0.75, 1.0), (0.65, 1.0)),
    "purple": ((275, 300), (0.65, 1.0), (0.45, 0.75)),
    "pink": ((325, 352), (0.22, 0.50), (0.95, 1.0)),
}
GREYS = {"white": (232, 255), "grey": (105, 160), "black": (0, 34)}
MAX_NOISE = 9.0
SUPERSAMPLING = 3


def draw(scene: Scene) -> Image.Image:
    """Draw the scene as an RGB image of its size. The same scene gives the same pixels."""
    rng = random.Random(scene.grain)
    grey = rng.uniform(*GREYS[scene.background])
    image = Image.new("RGB", (scene.width, scene.height), (round(grey),) * 3)
    for shape in scene.shapes:
        _paint(image, shape, _shade(rng, shape.colour))
    strength = rng.uniform(0.0, MAX_NOISE) if rng.random() < 0.7 else 0.0
    if not strength:
        return image
    noise = np.random.default_rng(rng.getrandbits(32)).standard_normal((scene.height, scene.width, 3), dtype=np.float32)
    return Image.fromarray(np.clip(np.asarray(image) + strength * noise, 0, 255).astype(np.uint8))


def _shade(rng: random.Random, colour: str) -> tuple[int, int, int]:
    hue, saturation, value = (rng.uniform(*bounds) for bounds in SHADES[colour])
    red, green, blue = colorsys.hsv_to_rgb(hue % 360 / 360, saturation, value)
    return round(255 * red), round(255 * green), round(255 * blue)


def _paint(image: Image.Image, shape: Shape, shade: tuple[int, int, int]) -> None:
    """Paste the shape through a mask that is drawn several times as large, for smooth edges."""
    radius = shape.radius * min(image.size)
    left, top = math.floor(shape.x * image.width - radius), math.floor(shape.y * image.height - radius)
    side = math.ceil(2 * radius) + 2
    centre = (shape.x * image.width - left, shape.y * image.height - top)
    mask = Image.new("L", (side * SUPERSAMPLING,) * 2)
    pencil = ImageDraw.Draw(mask)
    points = [
        (SUPERSAMPLING * (centre[0] + radius * x), SUPERSAMPLING * (centre[1] + radius * y))
        for x, y in _outline(shape.kind, math.radians(shape.turned))
    ]
    if shape.kind == "circle":
        pencil.ellipse([*points[0], *points[1]], fill=255)
    else:
        pencil.polygon(points, fill=255)
    image.paste(shade, (left, top), mask.reduce(SUPERSAMPLING))


def _outline(kind: str, turned: float) -> list[tuple[float, float]]:
    """Return corners inside the unit circle, y downwards, turned by radians; for a circle the corners of its box."""
    if kind == "circle":
        return [(-0.86, -0.86), (0.86, 0.86)]
    if kind == "cross":
        arm, half = 0.94, 0.3
        quarter = [(-half, -arm), (half, -arm), (half, -half)]
        points = [_turn(point, math.pi / 2 * index) for index in range(4) for point in quarter]
    else:
        count, inner = {"square": (4, 1.0), "triangle": (3, 1.0), "star": (10, 0.42)}[kind]
        begin = math.pi / 4 if kind == "square" else 0.0
        points = []
        for index in range(count):
            length = inner if index % 2 else 1.0
            points.append(_turn((0.0, -length), begin + 2 * math.pi * index / count))
    return [_turn(point, turned) for point in points]


def _turn(point: tuple[float, float], angle: float) -> tuple[float, float]:
    x, y = point
    return x * math.cos(angle) - y * math.sin(angle), x * math.sin(angle) + y * math.cos(angle)


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
