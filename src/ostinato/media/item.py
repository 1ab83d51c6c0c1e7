"""An image as the encoder gets it, and where the tokens of a prompt with images stand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ostinato.media.patches import Patches


@dataclass(frozen=True, eq=False)
class MediaItem:
    """One image, or one temporal patch of a video, ready for the encoder.

    `num_tokens` tokens of the prompt stand for it: one for each `merge_size ** 2` patches, of which those in `kept`
    alone if tokens were pruned.
    """

    patches: np.ndarray | Patches
    """[patches, patch_elements] float32, in the order of merging, or what `np.asarray` makes that of"""
    grid: tuple[int, int]
    """Height and width, in patches"""
    num_tokens: int
    digest: str
    """A cryptographic one of pixels, grid, processing and `kept`"""
    kept: np.ndarray | None = None
    """[num_tokens] int64: the output tokens that are kept, ascending; None: all of them"""


@dataclass(frozen=True, eq=False)
class RopePositions:
    """Where a request's tokens stand in time, height and width (M-RoPE): those of the prompt as listed, all that
    follow it at their position plus `delta`, in all three."""

    prompt: np.ndarray
    """[prompt tokens, 3] int64"""
    delta: int

    def of(self, start: int, end: int) -> np.ndarray:
        """[end - start, 3] int64: of the tokens at positions `start` to `end - 1`."""
        known = self.prompt[start:end]
        following = np.arange(start + len(known), end, dtype=np.int64) + self.delta
        return np.concatenate((known, np.repeat(following[:, None], 3, axis=1)))
