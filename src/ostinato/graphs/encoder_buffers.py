"""Persistent buffers of the vision encoder: where the images of a pack lie when a graph reads them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ostinato.layers.step import EncoderInputs
from ostinato.plan.model import VisionSpec

PADDED = ("taps", "tap_weights", "positions")
"""Inputs that are padded with zeros, as an index has to be valid. The patches of padding stay what they were: no real
row depends on them."""


class EncoderBuffers:
    """The inputs of one pack, at addresses that never change: `max_tokens` output tokens, `max_items` images."""

    def __init__(self, max_tokens: int, max_items: int, vision: VisionSpec, device: torch.device) -> None:
        patches = max_tokens * vision.patches_per_token

        def of(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.whole = EncoderInputs(
            patches=of(patches, vision.patch_elements, dtype=torch.float32),
            taps=of(patches, 4, dtype=torch.int64),
            tap_weights=of(patches, 4, dtype=torch.float32),
            positions=of(patches, 2, dtype=torch.int64),
            starts=of(max_items + 1, dtype=torch.int32),
        )

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from vars(self.whole).items()

    @property
    def num_bytes(self) -> int:
        return sum(buffer.numel() * buffer.element_size() for _, buffer in self.named())

    def view(self, patches: int) -> EncoderInputs:
        """The first `patches` patches, with the segments of all images that there is room for."""
        whole = self.whole
        return EncoderInputs(
            patches=whole.patches[:patches],
            taps=whole.taps[:patches],
            tap_weights=whole.tap_weights[:patches],
            positions=whole.positions[:patches],
            starts=whole.starts,
        )

    def fill(self, inputs: EncoderInputs, patches: int) -> EncoderInputs:
        """Writes `inputs`, padded to `patches` patches and with segments without patches -> the view of the real
        ones."""
        real, segments = inputs.length, inputs.starts.shape[0] - 1
        whole = self.whole
        assert real <= patches, "a pack has more patches than it is padded to"
        assert segments < whole.starts.shape[0], "a pack has more images than there is room for"
        whole.patches[:real] = inputs.patches
        for name in PADDED:
            buffer = getattr(whole, name)
            buffer[:real] = getattr(inputs, name)
            buffer[real:patches] = 0
        whole.starts[: segments + 1] = inputs.starts
        whole.starts[segments + 1 :] = real
        return self.view(real)
