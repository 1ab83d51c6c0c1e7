"""VisionSpec: the encoder of images in the plan."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.plan.calls import NO_CALLS, CallTrace
from ostinato.plan.weights import Weight, num_elements


@dataclass(frozen=True)
class VisionSpec:
    """Vision encoder in the plan: a transformer over patches of images, whose outputs replace token embeddings.

    An item is one image, or one temporal patch (`temporal_patch_size` frames) of a video. Each of its `merge_size ** 2`
    neighbouring patches give one output token, of `hidden_rows` vectors of `out_hidden_size`: one that replaces the
    token's embedding, and one for each of the first layers of the text model (DeepStack), taken after the encoder's
    layers `deepstack_layers`.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    in_channels: int
    out_hidden_size: int
    num_positions: int
    """Number of learned position embeddings, which form a square grid."""
    deepstack_layers: tuple[int, ...]
    image_token_id: int
    video_token_id: int
    start_token_id: int
    """Token before an image's tokens."""
    end_token_id: int
    weights: tuple[Weight, ...] = ()
    calls: CallTrace = NO_CALLS
    """Calls for one output token."""
    smallest_item: int = 64
    """Output tokens of the smallest image, as the checkpoint's image processor makes it.

    64 tokens are 256 x 256 pixels in patches of 16.
    """

    @property
    def parameters(self) -> int:
        return num_elements(self.weights)

    @property
    def patch_elements(self) -> int:
        """Elements of a patch, as the encoder reads it."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def patches_per_token(self) -> int:
        return self.merge_size**2

    @property
    def token_side(self) -> int:
        """Pixels along a side of the area that an output token represents."""
        return self.merge_size * self.patch_size

    @property
    def hidden_rows(self) -> int:
        """Vectors of an output token."""
        return 1 + len(self.deepstack_layers)
