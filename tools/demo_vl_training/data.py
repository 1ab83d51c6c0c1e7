"""Training batches: conversations about drawings as token ids, loss weights and pixels.

Batches hold conversations of similar length and about the same number of tokens, padding included.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from demo_training.groups import by_length
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as picture_size
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as clip_size

from ostinato.demo.canvas import draw
from ostinato.demo.drawings import Conversation, DrawingTurn, training_conversation, training_scene
from ostinato.demo.scenes import COLOURS, KINDS, Scene

from .shape import LEAST_CLIP_PIXELS, LEAST_PIXELS, MERGE, MOST_CLIP_PIXELS, MOST_PIXELS, PATCH, TEMPORAL
from .tokenizer import END, IMAGE, PAD, START, VIDEO, VISION_END, VISION_START

FRAME_RATES = (24.0, 24.0, 4.0, 2.0, 1.0)
POOL = 12
EXAMPLES = 250
PICTURES = 64
NOTHING = (len(KINDS), len(COLOURS))


@dataclass
class Sequence:
    """A conversation: token ids, whether each is to be learned, and what is shown, in the order of its placeholders."""

    ids: list[int] = field(default_factory=list)
    learned: list[bool] = field(default_factory=list)
    pictures: list[np.ndarray] = field(default_factory=list)
    picture_grids: list[tuple[int, int, int]] = field(default_factory=list)
    labels: list[np.ndarray] = field(default_factory=list)
    clips: list[np.ndarray] = field(default_factory=list)
    clip_grids: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, ids: list[int], learned: bool) -> None:
        self.ids += ids
        self.learned += [learned] * len(ids)


class Encoder:
    """Turns conversations into sequences, as the chat template and transformers' processors do."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.special = {name: tokenizer.token_to_id(name) for name in (PAD, IMAGE, VIDEO)}

    def sequence(self, conversation: Conversation, rate: float = 24.0, wrapped: bool = True) -> Sequence:
        """The whole conversation with its answers; `rate` and `wrapped` say how a clip's frames are written.

        Some processors put a clip's marks around those of its frames (`wrapped`), others in their place.
        """
        sequence = Sequence()
        for turn in conversation:
            self._ask(sequence, turn, rate, wrapped)
            sequence.add(self.tokenizer.encode(turn.question.answer + END).ids, learned=True)
            sequence.add(self.tokenizer.encode("\n").ids, learned=False)
        return sequence

    def prompt(self, conversation: Conversation, rate: float = 24.0, wrapped: bool = True) -> Sequence:
        """The conversation up to its last answer."""
        sequence = self.sequence(conversation, rate, wrapped)
        answer = self.tokenizer.encode(conversation[-1].question.answer + END).ids
        cut = len(sequence.ids) - len(answer) - 1
        sequence.ids, sequence.learned = sequence.ids[:cut], sequence.learned[:cut]
        return sequence

    def _ask(self, sequence: Sequence, turn: DrawingTurn, rate: float, wrapped: bool) -> None:
        shown = ""
        for scene in (item for item in turn.shown if isinstance(item, Scene)):
            patches, grid = _picture(draw(scene))
            sequence.pictures.append(patches)
            sequence.picture_grids.append(grid)
            sequence.labels.append(token_labels(scene, grid))
            shown += VISION_START + IMAGE * (grid[1] * grid[2] // MERGE**2) + VISION_END
        frames = turn.frames()
        if frames:
            patches, grid = _clip(frames)
            sequence.clips.append(patches)
            sequence.clip_grids.append(grid)
            held = VIDEO * (grid[1] * grid[2] // MERGE**2)
            seconds = [(TEMPORAL * index + (TEMPORAL - 1) / 2) / rate for index in range(grid[0])]
            written = "".join(f"<{time:.1f} seconds>{VISION_START}{held}{VISION_END}" for time in seconds)
            shown += VISION_START + written + VISION_END if wrapped else written
        prompt = f"{START}user\n{shown}{turn.question.text}{END}\n{START}assistant\n"
        sequence.add(self.tokenizer.encode(prompt).ids, learned=False)


def token_labels(scene: Scene, grid: tuple[int, int, int]) -> np.ndarray:
    """[tokens, 2] int64: kind and colour of the shape that each token of the picture sees, `NOTHING` beside shapes."""
    rows, columns = grid[1] // MERGE, grid[2] // MERGE
    short = min(scene.width, scene.height)
    labels = np.tile(np.array(NOTHING), (rows, columns, 1))
    x, y = (np.arange(columns) + 0.5) / columns, (np.arange(rows) + 0.5) / rows
    for shape in scene.shapes:
        dx, dy = (x - shape.x) * scene.width / short, (y - shape.y) * scene.height / short
        seen = np.hypot(dx[None], dy[:, None]) < shape.radius + 0.25 / min(rows, columns)
        labels[seen] = KINDS.index(shape.kind), COLOURS.index(shape.colour)
    return labels.reshape(rows * columns, 2)


def _picture(image: Image.Image) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Patches and grid of a picture, which stands for all frames of a patch."""
    size = picture_size(image.height, image.width, PATCH * MERGE, min_pixels=LEAST_PIXELS, max_pixels=MOST_PIXELS)
    return _patches([image] * TEMPORAL, size)


def _clip(frames: list[Image.Image]) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Patches and grid of frames of one size."""
    width, height = frames[0].size
    size = clip_size(
        len(frames), height, width, TEMPORAL, PATCH * MERGE, min_pixels=LEAST_CLIP_PIXELS, max_pixels=MOST_CLIP_PIXELS
    )
    return _patches(frames, size)


def _patches(frames: list[Image.Image], size: tuple[int, int]) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Patches [tokens, values] of frames resized to (height, width), in the order of transformers, and their grid."""
    resized = [frame.resize(size[::-1], Image.Resampling.BICUBIC) for frame in frames]
    pixels = np.stack([np.asarray(frame, np.float32) for frame in resized]) / 127.5 - 1.0
    t, h, w = len(frames) // TEMPORAL, size[0] // PATCH, size[1] // PATCH
    parts = pixels.reshape(t, TEMPORAL, h // MERGE, MERGE, PATCH, w // MERGE, MERGE, PATCH, 3)
    return parts.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(t * h * w, -1), (t, h, w)


@dataclass
class Batch:
    """Ids, mask and what is learned [rows, length]; patches of all pictures and clips, and their grids [n, 3].

    `labels` are those of the pictures' tokens, [tokens, 2].
    """

    ids: Tensor
    mask: Tensor
    learned: Tensor
    labels: Tensor
    inputs: dict[str, Tensor]


def collate(sequences: list[Sequence], pad: int, image: int, video: int) -> Batch:
    """Pads on the right. `inputs` are named as transformers' forward names them."""
    width = max(len(sequence.ids) for sequence in sequences)
    ids = torch.full((len(sequences), width), pad)
    learned = torch.zeros(len(sequences), width, dtype=torch.bool)
    mask = torch.zeros(len(sequences), width, dtype=torch.long)
    for row, sequence in enumerate(sequences):
        length = len(sequence.ids)
        ids[row, :length] = torch.tensor(sequence.ids)
        learned[row, :length] = torch.tensor(sequence.learned)
        mask[row, :length] = 1
    inputs = {"mm_token_type_ids": (ids == image).int() + 2 * (ids == video).int()}
    pictures = [patches for sequence in sequences for patches in sequence.pictures]
    clips = [patches for sequence in sequences for patches in sequence.clips]
    if pictures:
        inputs["pixel_values"] = torch.from_numpy(np.concatenate(pictures))
        inputs["image_grid_thw"] = torch.tensor([grid for sequence in sequences for grid in sequence.picture_grids])
    if clips:
        inputs["pixel_values_videos"] = torch.from_numpy(np.concatenate(clips))
        inputs["video_grid_thw"] = torch.tensor([grid for sequence in sequences for grid in sequence.clip_grids])
    labels = [part for sequence in sequences for part in sequence.labels] or [np.zeros((0, 2), np.int64)]
    return Batch(ids, mask, learned, torch.from_numpy(np.concatenate(labels)), inputs)


def pictures(seed: int, pool: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pictures without questions: patches [patches, values], grids [n, 3], labels [tokens, 2]."""
    rng = random.Random(f"pictures {seed} {pool}")
    scenes = [training_scene(rng) for _ in range(PICTURES)]
    made = [(*_picture(draw(scene)), scene) for scene in scenes]
    made.sort(key=lambda each: each[1])
    labels = np.concatenate([token_labels(scene, grid) for _, grid, scene in made])
    grids = torch.tensor([grid for _, grid, _ in made])
    return torch.from_numpy(np.concatenate([patches for patches, _, _ in made])), grids, torch.from_numpy(labels)


def example_patches(encoder: Encoder, seed: int) -> Tensor:
    """Patches [patches, values] of some pictures and clips."""
    rng = random.Random(f"patches {seed}")
    sequences = [encoder.sequence(training_conversation(rng)) for _ in range(EXAMPLES)]
    return torch.from_numpy(np.concatenate([part for each in sequences for part in each.pictures + each.clips]))


def batches(encoder: Encoder, seed: int, pool: int, tokens: int, single: float) -> Iterator[Batch]:
    """One pool of batches, each of at most `tokens` tokens and as many conversations of like length as that allows.

    `single` is the share of scenes that are made of one shape, beyond those that are so anyway.
    """
    rng = random.Random(f"drawings {seed} {pool}")
    sequences: list[Sequence] = []
    drawn = 0
    while drawn < POOL * tokens:
        conversation = training_conversation(rng, single=single)
        sequences.append(encoder.sequence(conversation, rng.choice(FRAME_RATES), rng.random() < 0.5))
        drawn += len(sequences[-1].ids)
    groups = by_length(sequences, tokens)
    rng.shuffle(groups)
    special = encoder.special
    for group in groups:
        # Pictures of one size side by side are attended to at once.
        group.sort(key=lambda sequence: (sequence.picture_grids, sequence.clip_grids))
        yield collate(group, special[PAD], special[IMAGE], special[VIDEO])
