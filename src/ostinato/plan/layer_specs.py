"""LayerSpec and VisionSpec: a layer of a model and its image encoder, as the plan sees them.

A layer has its attention and its experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ostinato.json_io import JsonObject
from ostinato.ops.operations import ENCODER_OPS
from ostinato.plan.graphs.arena import NO_CALLS, CallTrace
from ostinato.plan.mixers import Mixer, operations_of
from ostinato.plan.weights import Weight, num_elements


@dataclass(frozen=True)
class IndexerSpec:
    """Indexer of an attention, which selects blocks of `ratio` tokens for each token, `budget` tokens in all.

    It has heads of queries, and one key per token, which is cached beside the token's keys and values.
    """

    num_heads: int
    head_dim: int
    budget: int
    ratio: int
    is_gated: bool = False
    """True if a key is cached with a gate for each of its elements, which are its shares in the key of its block."""
    is_shared: bool = False
    """True if the blocks are those that the layer before selected; then it caches no key."""
    has_tail: bool = True
    """True if a token also attends to the incomplete block that it is in."""

    @property
    def entry_size(self) -> int:
        """Elements of a token's entry in the indexer's cache."""
        if self.is_shared:
            return 0
        return (2 if self.is_gated else 1) * self.head_dim


@dataclass(frozen=True)
class AttentionSpec:
    """Attention of one layer; its keys and values are stored in blocks."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotates: bool = True
    """True if it uses a rotary embedding of the model, if there is one."""
    rope: int = 0
    """Index of that embedding in `ModelSpec.ropes`."""
    window: int | None = None
    """Number of positions that a token attends to, its own included; None: all up to its own."""

    values_in_keys: bool = False
    """True if a token's values are elements of its keys, as in multi-head latent attention.

    Then the cache stores keys alone.
    """

    has_sinks: bool = False
    """True if each head has a learned score without a value in its softmax."""

    softcap: float | None = None
    """A score s becomes softcap * tanh(s / softcap)."""

    sees_ahead: bool = False
    """True if the tokens of an image, or of a prefix LM's prompt, see each other in both directions."""

    keys_of: int | None = None
    """Number of an earlier layer whose keys and values it reads; None: it stores its own."""

    indexer: IndexerSpec | None = None
    """Indexer that selects the blocks of keys that a token attends to; None: it attends to all of them."""

    @property
    def operation(self) -> Literal["attention", "indexed_attention", "selected_attention"]:
        if self.indexer is None:
            return "attention"
        return "selected_attention" if self.indexer.is_gated else "indexed_attention"

    @property
    def operations(self) -> tuple[str, ...]:
        """The operations with its sizes: attention, and before it the choice of blocks if that is one of its own."""
        selects = self.indexer is not None and self.indexer.is_gated and not self.indexer.is_shared
        return ("select_blocks", self.operation) if selects else (self.operation,)

    @property
    def kv_elements_per_token(self) -> int:
        """Elements of one token in the cache, which this layer reads.

        They are its keys, its values unless these are part of the keys, and the entry of an indexer.
        """
        return self._kv_heads_per_token * self.head_dim + self._index_elements

    @property
    def scales_per_token(self) -> int:
        """Scales of one token in a cache of 8 bits: of each head of keys and of values, and of the indexer's entry."""
        return self._kv_heads_per_token + (self._index_elements > 0)

    @property
    def _kv_heads_per_token(self) -> int:
        return (1 if self.values_in_keys else 2) * self.num_kv_heads

    @property
    def _index_elements(self) -> int:
        return 0 if self.indexer is None else self.indexer.entry_size


@dataclass(frozen=True)
class LatentSizes:
    """Sizes of multi-head latent attention, in elements.

    `rank` is that of a token's latent, `shared` that of the key part that all heads share. `key` and `value` are those
    of each head's own key and value, which are computed from the latent by a matmul.
    """

    rank: int
    shared: int
    key: int
    value: int


@dataclass(frozen=True)
class ExpertsSpec:
    """Experts of one layer. A router chooses `top_k` of them for each token.

    `size` is that of their input and result. An activation with a gate takes `intermediate_size` twice.
    """

    num_experts: int
    top_k: int
    size: int
    intermediate_size: int
    is_gated: bool = True

    @property
    def inner_size(self) -> int:
        """Size of the result of an expert's first matmul."""
        return (2 if self.is_gated else 1) * self.intermediate_size

    @property
    def parameters_of_each(self) -> int:
        return self.size * (self.inner_size + self.intermediate_size)

    @property
    def activation_elements(self) -> int:
        """Elements per token of the chosen experts: between their two matmuls, with a gate's, and after them."""
        return self.top_k * (self.inner_size + self.size + self.intermediate_size)


@dataclass(frozen=True)
class LayerSpec:
    """One layer of the stack. A layer may have attention, a state mixer, both (Falcon-H1) or neither (an MLP).

    `weights` are its rows of the weight table, with names relative to the layer. `activation_elements` is derived from
    its calls: the largest number of elements per token of its intermediate results that are alive at once, without the
    residual stream, its normed form and the experts' results.
    """

    kind: str
    attention: AttentionSpec | None = None
    mixer: Mixer | None = None
    """Mixer that keeps a state in slots, if the layer has one."""
    experts: ExpertsSpec | None = None
    activation_elements: int = 0
    weights: tuple[Weight, ...] = ()
    shared_weights: tuple[Weight, ...] = ()
    """Rows of weights that it uses and another layer has, named as if they were in this layer too."""
    use: int | None = None
    """Index of this use, for a layer whose block is shared with other layers."""

    @cached_property
    def parameters(self) -> int:
        """Parameters stored in the model's dtype."""
        return num_elements(self.weights, in_float32=False)

    @cached_property
    def float32_parameters(self) -> int:
        """Parameters stored in float32, whatever the model's dtype is."""
        return num_elements(self.weights, in_float32=True)

    @cached_property
    def used_parameters(self) -> int:
        """Number of `parameters` and of those that it borrows."""
        return self.parameters + num_elements(self.shared_weights, in_float32=False)

    @cached_property
    def expert_parameters(self) -> int:
        return num_elements(self.expert_weights)

    @property
    def inactive_parameters(self) -> int:
        """Parameters that a token does not use: those of experts that its router does not choose."""
        experts = self.experts
        return 0 if experts is None else (experts.num_experts - experts.top_k) * experts.parameters_of_each

    @cached_property
    def linears(self) -> tuple[Weight, ...]:
        """Matrices that it multiplies with and that can be quantised, except the experts'."""
        used = (*self.weights, *self.shared_weights)
        return tuple(weight for weight in used if weight.can_be_quantised and weight.role != "experts")

    @cached_property
    def expert_weights(self) -> tuple[Weight, ...]:
        """Matrices of all experts: inward, and outward."""
        return tuple(weight for weight in self.weights if weight.role == "experts")


def layer_sizes(op: str, layer: LayerSpec) -> Iterator[JsonObject]:
    """Yield the sizes of each call of an operation in a layer, under the names that the operations' rules use.

    The rules are those for work, scratch memory and launches. Sizes of the step, such as its tokens, are not among
    them.
    """
    if op == "linear":
        for linear in layer.linears:
            yield {"in_size": linear.in_size, "out_size": linear.out_size, "elements": linear.num_elements}
    elif op in ("moe", "route") and layer.experts is not None:
        yield {**vars(layer.experts), "inner_size": layer.experts.inner_size}
    elif layer.attention is not None and op in (*layer.attention.operations, "rotary", "rotate"):
        sizes = {**vars(layer.attention), "kv_elements": layer.attention.kv_elements_per_token}
        if (indexer := layer.attention.indexer) is None:
            yield sizes
            return
        queries = 0 if indexer.is_gated else indexer.num_heads  # Which are rotated, or pass by with the keys.
        of_index = {**sizes, "num_heads": queries, "num_kv_heads": 1, "head_dim": indexer.entry_size}
        if op == "rotate":
            yield of_index
            return
        of_blocks = {"index_ratio": indexer.ratio, "index_budget": indexer.budget}
        yield {**sizes, "index_heads": indexer.num_heads, "index_dim": indexer.head_dim, **of_blocks}
        if op == "rotary" and indexer.entry_size:
            yield {**of_index, "rotated": 0}  # Its queries are rotated before, and the keys of blocks later.
    elif op in operations_of(layer.mixer):
        assert layer.mixer is not None, "its operations are those of a mixer"
        yield dict(layer.mixer.sizes)


ImagePlaces = Literal["tokens", "enclosed", "start"]
"""Place of an image's tokens in the text of a chat template.

`tokens`: they replace one of them. `enclosed`: so they do, and the start and end tokens of images are put around them.
`start`: they replace the start token, in a paragraph of their own, enclosed in start and end.
"""


@dataclass(frozen=True)
class CanvasTokens:
    """Ids of the tokens around images, and around the slices of a large one, whose rows end with a newline."""

    image_start: int
    image_end: int
    slice_start: int
    slice_end: int
    newline: int

    @property
    def markers(self) -> frozenset[int]:
        return frozenset((self.image_start, self.image_end, self.slice_start, self.slice_end, self.newline))


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
    merge_size: int
    in_channels: int
    out_hidden_size: int
    num_positions: int
    """Number of learned position embeddings, of a square grid or of columns and rows; 0 if it has none."""
    image_token_id: int
    temporal_patch_size: int = 1
    deepstack_layers: tuple[int, ...] = ()
    video_token_id: int | None = None
    """Token that stands for a video; None if it takes no videos."""
    start_token_id: int | None = None
    """Token before an image's tokens; None if config.json does not name it."""
    end_token_id: int | None = None
    weights: tuple[Weight, ...] = ()
    calls: CallTrace = NO_CALLS
    """Calls for one output token."""
    smallest_item: int = 64
    """Output tokens of the smallest image, as the checkpoint's image processor makes it.

    64 tokens are 256 x 256 pixels in patches of 16.
    """
    conv_size: int = 0
    """Side of the square of neighbouring patches that its convolutions see; 0 if it has none."""
    is_naflex: bool = False
    """True if patches have their channels last, and position embeddings are resized with antialiasing.

    SigLIP 2 (arXiv 2502.14786) calls it NaFlex.
    """
    cuts_tiles: bool = False
    """True if large images are cut into tiles, which are items of their own."""
    image_side: int = 0
    """Pixels along both sides of every image, which is resized to them; 0 if images keep their proportions."""
    is_bidirectional: bool = False
    """True if the tokens of an image see each other in both directions, so that one step computes all of them."""
    places: ImagePlaces = "tokens"
    """Place of an image's tokens in the text that a chat template writes."""
    text_token_id: int | None = None
    """Token that the text part reads in place of an image's tokens (for small embeddings); None: those themselves."""
    positions_by_axis: bool = False
    """True if half of the position embeddings are of columns and half of rows; a patch has the sum of two."""
    is_encoder_free: bool = False
    """True if it has no blocks: a patch has a token's pixels, from 0 to 1, and columns and rows take turns among the
    position embeddings."""
    crops_positions: bool = False
    """True if position embeddings are resized to the square of an image's longer side, and then cut.

    The cropped position embeddings of RADIO (arXiv 2412.07679). Images are resized as float32.
    """
    has_windows: bool = False
    """True if a layer attends within windows of two by two patches, and makes each of them one patch.

    The patches of a window are neighbours; those of a token are four windows.
    """
    has_nearest_positions: bool = False
    """True if a patch has the nearest one of the position embeddings, when they are stretched over the image."""
    canvas: CanvasTokens | None = None
    """Tokens around images and slices, whose positions are on a canvas; None: positions follow those of Qwen3-VL."""
    num_prefix: int = 0
    """Learned vectors before each image's patches, which attend with them and give no token: classes and registers."""
    enclosing: tuple[str, str] = ("<|image_start|>", "<|image_end|>")
    """Texts around an image's tokens, if config.json does not name theirs."""

    @property
    def taps(self) -> int:
        """Number of embeddings that a patch's own is interpolated from, or of patches that a convolution sees."""
        if self.positions_by_axis:
            return 2
        if self.is_naflex:
            return self.num_positions  # A grid of one patch averages all of them.
        return self.conv_size**2 or 4

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of config.json that stand for images or around them."""
        ids = [self.image_token_id, self.video_token_id, self.start_token_id, self.end_token_id]
        if self.canvas is not None:
            ids += [self.canvas.slice_start, self.canvas.slice_end]
        return tuple(token_id for token_id in ids if token_id is not None)

    @property
    def ops(self) -> frozenset[str]:
        """Names of the ops/ functions that it calls."""
        return frozenset(call.operation for call in self.calls.calls) & ENCODER_OPS

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
    def prefix_tokens(self) -> int:
        """Output tokens that an image's prefix would give, and its padding to whole ones; they are thrown away."""
        return -(-self.num_prefix // self.patches_per_token)

    def rows_of(self, tokens: int, images: int = 1) -> int:
        """Return the rows of images with `tokens` output tokens in all: their patches, and their prefixes."""
        return (tokens + images * self.prefix_tokens) * self.patches_per_token

    def segments_of(self, images: int) -> int:
        """Return the segments of attention in which images lie: one each, and one of padding before each prefix."""
        return 2 * images if self.num_prefix else images

    @property
    def token_side(self) -> int:
        """Pixels along a side of the area that an output token represents."""
        return self.merge_size * self.patch_size

    @property
    def hidden_rows(self) -> int:
        """Vectors of an output token."""
        return 1 + len(self.deepstack_layers)
