"""ModelSpec: everything that the plan needs to know of a model, read from its config.json alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ostinato.plan.quantization import LinearSpec, Quantization

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class AttentionSpec:
    """The attention of one layer; its keys and values live in blocks."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def kv_elements_per_token(self) -> int:
        """Elements of key and value that one token adds to the cache in this layer."""
        return 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class Mamba2Spec:
    """The Mamba-2 mixer of one layer; its conv and SSM state live in slots."""

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_kernel: int
    chunk_size: int
    scan_writes_states: bool = True
    """Whether the scan of a prompt can write out states that it passes on its way."""

    @property
    def intermediate_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: x, B and C side by side."""
        return self.intermediate_size + 2 * self.num_groups * self.state_size

    @property
    def in_proj_size(self) -> int:
        """Output of the input projection: gate, convolution channels and one time step per head."""
        return self.intermediate_size + self.conv_dim + self.num_heads

    @property
    def conv_state_elements(self) -> int:
        return (self.conv_kernel - 1) * self.conv_dim

    @property
    def ssm_state_elements(self) -> int:
        return self.num_heads * self.head_dim * self.state_size


@dataclass(frozen=True)
class LayerSpec:
    """One layer of the stack. A layer may hold attention, a state mixer, both (Falcon-H1) or neither (an MLP).

    `parameters` are stored in the model's dtype, `float32_parameters` in float32 whatever that dtype is (the
    decay, skip and time-step vectors of a state mixer, the correction bias of a router). `activation_elements`
    is the number of elements per token of the layer's widest intermediate results alive at once, without the
    residual stream and the experts' own. `inactive_parameters` are those of `parameters` that a token does not meet:
    the experts that its router does not choose. `linears` are the matrices among `parameters` that can be
    quantised: all but the router's, and those of the `experts`, inward and outward, which can be too.
    """

    kind: str
    attention: AttentionSpec | None
    mamba2: Mamba2Spec | None
    parameters: int
    float32_parameters: int
    activation_elements: int
    inactive_parameters: int = 0
    linears: tuple[LinearSpec, ...] = ()
    experts: tuple[LinearSpec, ...] = ()

    @property
    def expert_parameters(self) -> int:
        return sum(linear.in_size * linear.out_size for linear in self.experts)

    @property
    def num_experts(self) -> int:
        return self.experts[1].out_size // self.experts[0].in_size if self.experts else 0

    @property
    def experts_per_token(self) -> int:
        """Those that its router chooses."""
        met = self.expert_parameters - self.inactive_parameters
        return met * self.num_experts // self.expert_parameters if self.experts else 0

    @property
    def expert_elements(self) -> int:
        """Elements per token between its experts' two products, with a gate's, and behind them."""
        if not self.experts:
            return 0
        up, down = self.experts
        return self.experts_per_token * ((up.out_size + down.out_size) // self.num_experts + down.in_size)


@dataclass(frozen=True)
class DrafterSpec:
    """What makes drafts with weights of its own, as the plan sees it: its layers are appended to the model's in block
    and slot.

    `mtp`: a prediction head, whose `outer_parameters` are those that join a token with a hidden state; slots hold
    `hidden_elements` of the model's hidden state beside the states. `draft`: a second `model`, `hidden_elements` 0.
    """

    method: Literal["mtp", "draft"]
    layers: tuple[LayerSpec, ...]
    outer_parameters: int
    hidden_elements: int
    ops: tuple[str, ...]
    model: ModelSpec | None = None
    outer_linears: tuple[LinearSpec, ...] = ()
    """The matrices among `outer_parameters` that can be quantised."""
    quantization: Quantization | None = None
    """Of a prediction head."""

    @property
    def num_parameters(self) -> int:
        return _num_parameters(self.outer_parameters, self.layers)

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of its own weights when it runs in `dtype`; a head's embedding and LM head are the model's."""
        if self.model is not None:
            return self.model.weight_bytes(dtype)
        linears = (*self.outer_linears, *_linears(self.layers), *_experts(self.layers))
        return _weight_bytes(self.outer_parameters, self.layers, dtype) - saved_bytes(
            (linear.under("mtp.") for linear in linears), self.quantization, dtype
        )


@dataclass(frozen=True)
class VisionSpec:
    """A vision encoder, as the plan sees it: a transformer over patches of images, whose outputs stand in for tokens.

    An item is one image, or one temporal patch (`temporal_patch_size` frames) of a video. Each of its
    `merge_size ** 2` neighbouring patches give one output token, of `hidden_rows` vectors of `out_hidden_size`: one
    that takes the place of the token's embedding, and one for each of the first layers of the text model (DeepStack),
    taken behind the encoder's layers `deepstack_layers`.
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
    """Learned position embeddings, of a square grid."""
    deepstack_layers: tuple[int, ...]
    parameters: int
    image_token_id: int
    video_token_id: int
    start_token_id: int
    """Stands before an image's tokens."""
    end_token_id: int
    linears: tuple[LinearSpec, ...] = ()
    """The matrices among `parameters` that can be quantised."""
    smallest_item: int = 64
    """Output tokens of the smallest image, as the checkpoint's image processor makes it: 64 are 256 x 256 pixels in
    patches of 16."""

    @property
    def patch_elements(self) -> int:
        """Elements of a patch, as the encoder reads it."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def patches_per_token(self) -> int:
        return self.merge_size**2

    @property
    def token_side(self) -> int:
        """Pixels along a side of what an output token stands for."""
        return self.merge_size * self.patch_size

    @property
    def hidden_rows(self) -> int:
        """Vectors of an output token."""
        return 1 + len(self.deepstack_layers)


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding as the checkpoint asks for it.

    `kind` is one of `default`, `linear`, `llama3`, `yarn`, `dynamic`; `parameters` holds that kind's own factors
    under the names that config.json uses. `rotary_dim` is the number of rotated elements of each head.
    """

    kind: str
    theta: float
    rotary_dim: int
    original_max_position: int
    parameters: dict[str, Any]
    sections: tuple[int, int, int] | None = None
    """How many of the angles belong to time, height and width (M-RoPE), which take turns (see `plan.rope.axes`);
    None: tokens stand in a line."""


@dataclass(frozen=True)
class ModelSpec:
    """A model as the plan sees it. `hyperparameters` is the architecture's own dataclass, for its models/ file."""

    architecture: str
    dtype: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int | None
    tied_embeddings: bool
    layers: tuple[LayerSpec, ...]
    outer_parameters: int
    """Parameters outside the layers: embedding, final norm and, when not tied, the LM head."""
    ssm_state_dtype: str | None
    """`mamba_ssm_cache_dtype` of the checkpoint, where it names one."""
    rope: RopeSpec | None
    ops: tuple[str, ...]
    """Names of the ops/ functions that the model calls."""
    hyperparameters: Any
    head: DrafterSpec | None = None
    """The prediction head that the checkpoint has."""
    drafter: DrafterSpec | None = None
    """What makes drafts, where something with weights does."""
    stored_quantization: Quantization | None = None
    """How the checkpoint's weights are quantised, where they are."""
    quantization: Quantization | None = None
    """How they are while the model runs, a prediction head's among them."""
    vision: VisionSpec | None = None
    """The encoder of images, for models that have one."""
    backbone: str = "model."
    """What the checkpoint puts before the names of the layers."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def cached_layers(self) -> tuple[LayerSpec, ...]:
        """All layers with a part in blocks and slots: the model's, and behind them the drafter's."""
        return self.layers if self.drafter is None else self.layers + self.drafter.layers

    @property
    def attention_layers(self) -> tuple[AttentionSpec, ...]:
        """Those of `cached_layers`."""
        return tuple(layer.attention for layer in self.cached_layers if layer.attention is not None)

    @property
    def state_layers(self) -> tuple[Mamba2Spec, ...]:
        """Those of `cached_layers`."""
        return tuple(layer.mamba2 for layer in self.cached_layers if layer.mamba2 is not None)

    @property
    def keeps_state(self) -> bool:
        """Whether a request needs slots, so that its prefix can only be found again at a checkpoint."""
        return bool(self.state_layers) or (self.drafter is not None and self.drafter.hidden_elements > 0)

    @property
    def supports_all_checkpoints(self) -> bool:
        """Whether every state layer can give its state at any block boundary of a prompt, as mode `all` needs."""
        return all(mamba2.scan_writes_states for mamba2 in self.state_layers)

    @property
    def num_parameters(self) -> int:
        """All of the model's own parameters, its encoder's too, each counted once; a drafter has its own."""
        return _num_parameters(self.outer_parameters, self.layers) + self._vision_parameters

    @property
    def _vision_parameters(self) -> int:
        return 0 if self.vision is None else self.vision.parameters

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of the model's own weights, its encoder's too, when it runs in `dtype`; a drafter has its own."""
        whole = _weight_bytes(self.outer_parameters + self._vision_parameters, self.layers, dtype)
        return whole - saved_bytes((*self.linears, *self.experts), self.quantization, dtype)

    @property
    def linears(self) -> Iterator[LinearSpec]:
        """The matrices that can be quantised: those of the layers, and the LM head, which may be the embedding too."""
        for linear in _linears(self.layers):
            yield linear.under(self.backbone)
        yield LinearSpec(("lm_head",), self.hidden_size, self.vocab_size)

    @property
    def experts(self) -> Iterator[LinearSpec]:
        """Those of the layers' experts, which can be quantised too."""
        for linear in _experts(self.layers):
            yield linear.under(self.backbone)


def _num_parameters(outer: int, layers: tuple[LayerSpec, ...]) -> int:
    return outer + sum(layer.parameters + layer.float32_parameters for layer in layers)


def _linears(layers: tuple[LayerSpec, ...]) -> Iterator[LinearSpec]:
    for i, layer in enumerate(layers):
        for linear in layer.linears:
            yield linear.under(f"layers.{i}.")


def _experts(layers: tuple[LayerSpec, ...]) -> Iterator[LinearSpec]:
    for i, layer in enumerate(layers):
        for linear in layer.experts:
            yield linear.under(f"layers.{i}.")


def saved_bytes(linears: Iterable[LinearSpec], quantization: Quantization | None, dtype: str) -> int:
    """What quantisation saves of a model that runs in `dtype`."""
    if quantization is None:
        return 0
    return sum(
        linear.in_size * linear.out_size * DTYPE_BYTES[dtype] - quantization.num_bytes(linear)
        for linear in linears
        if quantization.covers(linear.names, linear.is_stack)
    )


def _weight_bytes(outer: int, layers: tuple[LayerSpec, ...], dtype: str) -> int:
    float32 = sum(layer.float32_parameters for layer in layers)
    return (_num_parameters(outer, layers) - float32) * DTYPE_BYTES[dtype] + float32 * 4
