"""ModelSpec: everything that the plan needs to know of a model, read from its config.json alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from ostinato.plan.calls import NO_CALLS, Calls
from ostinato.plan.mixers import NO_STATE, Mixer, StateArray, StateSpec
from ostinato.plan.quantization import AnyQuantization, BlockQuantization
from ostinato.plan.stored_weights import StoredWeights
from ostinato.plan.weights import Weight, num_elements

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class AttentionSpec:
    """The attention of one layer; its keys and values live in blocks."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotates: bool = True
    """Whether it has the positions of the model's rotary embedding, if there is one."""
    window: int | None = None
    """How many positions a token sees, of which its own is the last; None: all up to it."""

    values_in_keys: bool = False
    """Whether a token's values are the first elements of its keys, as in multi-head latent attention, so that the cache
    keeps keys alone."""

    @property
    def kv_elements_per_token(self) -> int:
        """Elements that one token adds to the cache in this layer: its keys, and its values where they are others."""
        return (1 if self.values_in_keys else 2) * self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class LatentSizes:
    """Of multi-head latent attention: elements of a token's latent (`rank`), of the key that all heads share, and of
    each head's own key and value, which are products of the latent."""

    rank: int
    shared: int
    key: int
    value: int


@dataclass(frozen=True)
class ExpertsSpec:
    """The experts of one layer, of which a router chooses `top_k` for each token. `size` is that of their input and
    result; an activation with a gate takes `intermediate_size` twice."""

    num_experts: int
    top_k: int
    size: int
    intermediate_size: int
    is_gated: bool = True

    @property
    def inner_size(self) -> int:
        """Of what an expert's inward product gives."""
        return (2 if self.is_gated else 1) * self.intermediate_size

    @property
    def parameters_of_each(self) -> int:
        return self.size * (self.inner_size + self.intermediate_size)

    @property
    def activation_elements(self) -> int:
        """Per token, of the chosen experts: between their two products, with a gate's, and behind them."""
        return self.top_k * (self.inner_size + self.size + self.intermediate_size)


@dataclass(frozen=True)
class LayerSpec:
    """One layer of the stack. A layer may hold attention, a state mixer, both (Falcon-H1) or neither (an MLP).

    Of the weight table it has its rows, `weights`, their names counted from the layer; and from its calls
    `activation_elements`: elements per token of its intermediate results that are there at once at the most, without
    the residual stream, its normed form and the experts' own.
    """

    kind: str
    attention: AttentionSpec | None = None
    mixer: Mixer | None = None
    """What keeps a state in slots, if it has one."""
    experts: ExpertsSpec | None = None
    activation_elements: int = 0
    weights: tuple[Weight, ...] = ()
    borrowed: tuple[Weight, ...] = ()
    """Rows of what it uses and another layer has, named as if it stood here too."""
    use: int | None = None
    """Of a layer with a block that others have too, which of their uses it is."""

    @cached_property
    def parameters(self) -> int:
        """Stored in the model's dtype."""
        return num_elements(self.weights, in_float32=False)

    @cached_property
    def float32_parameters(self) -> int:
        """Stored in float32 whatever that dtype is."""
        return num_elements(self.weights, in_float32=True)

    @cached_property
    def used_parameters(self) -> int:
        """Those of `parameters`, and those that it borrows."""
        return self.parameters + num_elements(self.borrowed, in_float32=False)

    @cached_property
    def expert_parameters(self) -> int:
        return num_elements(self.expert_weights)

    @property
    def inactive_parameters(self) -> int:
        """Those that a token does not meet: of experts that its router does not choose."""
        experts = self.experts
        return 0 if experts is None else (experts.num_experts - experts.top_k) * experts.parameters_of_each

    @cached_property
    def linears(self) -> tuple[Weight, ...]:
        """The matrices that it multiplies with and that can be quantised, but for the experts'."""
        used = (*self.weights, *self.borrowed)
        return tuple(weight for weight in used if weight.can_be_quantised and weight.role != "experts")

    @cached_property
    def expert_weights(self) -> tuple[Weight, ...]:
        """Of all experts: inward, and outward."""
        return tuple(weight for weight in self.weights if weight.role == "experts")


@dataclass(frozen=True)
class DrafterSpec:
    """What makes drafts with weights of its own, as the plan sees it: its layers are appended to the model's in block
    and slot.

    `mtp`: a prediction head, whose outer `weights` join a token with a hidden state; slots hold `hidden_elements` of
    the model's hidden state beside the states. `draft`: a second `model`, `hidden_elements` 0.
    """

    method: Literal["mtp", "draft"]
    layers: tuple[LayerSpec, ...]
    hidden_elements: int = 0
    weights: tuple[Weight, ...] = ()
    """Outside the layers."""
    ops: tuple[str, ...] = ()
    model: ModelSpec | None = None
    quantization: AnyQuantization | None = None
    """Of a prediction head."""
    calls: Calls = NO_CALLS
    """For one token of a prediction head's draft."""
    step_calls: Calls = NO_CALLS
    """For one token of the model that it follows, and of what follows."""

    @property
    def state(self) -> StateSpec:
        """Its own part of a slot, beside those of its layers: the model's last hidden state."""
        if not self.hidden_elements:
            return NO_STATE
        return StateSpec((StateArray("hidden", (1, self.hidden_elements), "model"),))

    @property
    def outer_parameters(self) -> int:
        return num_elements(self.weights)

    @property
    def num_parameters(self) -> int:
        return self.outer_parameters + _in_layers(self.layers)

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of its own weights when it runs in `dtype`; a head's embedding and LM head are the model's."""
        if self.model is not None:
            return self.model.weight_bytes(dtype)
        whole = _plain_bytes(self.weights, dtype) + sum(_plain_bytes(layer.weights, dtype) for layer in self.layers)
        return whole - saved_bytes(self.table, self.quantization, dtype)

    @property
    def mapped_bytes(self) -> int:
        """Of `weight_bytes`, those of a draft model that stay in the pages of its file."""
        return 0 if self.model is None else self.model.mapped_bytes

    @property
    def table(self) -> Iterator[Weight]:
        """All weights of a prediction head, as the checkpoint names them."""
        yield from self.weights
        yield from _under(self.layers, "mtp.")


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
    image_token_id: int
    video_token_id: int
    start_token_id: int
    """Stands before an image's tokens."""
    end_token_id: int
    weights: tuple[Weight, ...] = ()
    calls: Calls = NO_CALLS
    """For one output token."""
    smallest_item: int = 64
    """Output tokens of the smallest image, as the checkpoint's image processor makes it: 64 are 256 x 256 pixels in
    patches of 16."""

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
        """Pixels along a side of what an output token stands for."""
        return self.merge_size * self.patch_size

    @property
    def hidden_rows(self) -> int:
        """Vectors of an output token."""
        return 1 + len(self.deepstack_layers)


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding as the checkpoint asks for it.

    `kind` is one of `default`, `linear`, `llama3`, `yarn`, `dynamic`, `factors`; `parameters` holds that kind's own
    factors under the names that config.json uses. `rotary_dim` is the number of rotated elements of each head.
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
    ssm_state_dtype: str | None
    """`mamba_ssm_cache_dtype` of the checkpoint, where it names one."""
    rope: RopeSpec | None
    hyperparameters: Any
    ops: tuple[str, ...] = ()
    """Names of the ops/ functions that the model calls."""
    calls: Calls = NO_CALLS
    """For one token of a decode row."""
    weights: tuple[Weight, ...] = ()
    """Outside the layers: embedding, final norm and, when not tied, the LM head."""
    head: DrafterSpec | None = None
    """The prediction head that the checkpoint has."""
    drafter: DrafterSpec | None = None
    """What makes drafts, where something with weights does."""
    stored_quantization: StoredWeights | None = None
    """How the checkpoint's weights are quantised, where they are."""
    stored_blocks: tuple[tuple[str, int], ...] = ()
    """Of a GGUF file, the bytes of its tensors by type."""
    stored_formats: tuple[tuple[str, str], ...] = ()
    """Of a GGUF file, the tensors that lie in blocks, as the checkpoint names them, and the format of each."""
    stored_runs: tuple[tuple[str, ...], ...] = ()
    """Of a GGUF file, those of them that lie one directly behind the other, their rows in the checkpoint's order."""
    quantization: AnyQuantization | None = None
    """How they are while the model runs, a prediction head's among them."""
    vision: VisionSpec | None = None
    """The encoder of images, for models that have one."""
    ranks: int = 1
    """How many processes share the model; the sizes above are those of one."""
    whole: ModelSpec | None = None
    """The model that is shared, where it is."""
    given_tokens: int | None = None
    """Token ids that have a text in the tokenizer that was given in place of the checkpoint's, where one was."""
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
    def state_layers(self) -> tuple[Mixer, ...]:
        """Those of `cached_layers`."""
        return tuple(layer.mixer for layer in self.cached_layers if layer.mixer is not None)

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """All parts of a slot: those of the state layers, and what a prediction head keeps."""
        hidden = NO_STATE if self.drafter is None else self.drafter.state
        return (*(mixer.state for mixer in self.state_layers), *([hidden] if hidden.arrays else []))

    @property
    def keeps_state(self) -> bool:
        """Whether a request needs slots, so that its prefix can only be found again at a checkpoint."""
        return bool(self.states)

    @property
    def has_recurrence(self) -> bool:
        """Whether any state has the dtype that `ssm_state_dtype` says."""
        return any(state.recurrent_elements for state in self.states)

    @property
    def supports_all_checkpoints(self) -> bool:
        """Whether every state layer can give its state at any block boundary of a prompt, as mode `all` needs."""
        return all(mixer.scan_writes_states for mixer in self.state_layers)

    @cached_property
    def num_parameters(self) -> int:
        """All of the model's own parameters, its encoder's too, each counted once; a drafter has its own."""
        vision = 0 if self.vision is None else self.vision.parameters
        return num_elements(self.weights) + _in_layers(self.layers) + vision

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of the model's own weights, its encoder's too, when it runs in `dtype`; a drafter has its own."""
        whole = _plain_bytes(self.weights, dtype) + sum(_plain_bytes(layer.weights, dtype) for layer in self.layers)
        if self.vision is not None:
            whole += _plain_bytes(self.vision.weights, dtype)
        return whole - saved_bytes(self.table, self.quantization, dtype)

    @property
    def mapped_bytes(self) -> int:
        """Of `weight_bytes`, those that stay in the pages of the checkpoint's file."""
        chosen = self.quantization
        return chosen.mapped_bytes(self.table) if isinstance(chosen, BlockQuantization) else 0

    @property
    def table(self) -> Iterator[Weight]:
        """All of the model's own weights, as the checkpoint names them."""
        yield from self.weights
        yield from _under(self.layers, self.backbone)
        if self.vision is not None:
            yield from self.vision.weights

    @property
    def lm_head(self) -> Weight:
        """The LM head's matrix, which may be the embedding."""
        return next(weight for weight in self.weights if weight.is_lm_head)

    @property
    def linears(self) -> Iterator[Weight]:
        """The matrices that can be quantised, as the checkpoint names them: those of the layers, but for experts, and
        the LM head."""
        in_layers = _under(self.layers, self.backbone)
        yield from (weight for weight in in_layers if weight.can_be_quantised and weight.role != "experts")
        yield self.lm_head

    @property
    def experts(self) -> Iterator[Weight]:
        """Those of the layers' experts, which can be quantised too."""
        yield from (weight for weight in _under(self.layers, self.backbone) if weight.role == "experts")


def _under(layers: tuple[LayerSpec, ...], prefix: str) -> Iterator[Weight]:
    for i, layer in enumerate(layers):
        for weight in layer.weights:
            yield weight.under(f"{prefix}layers.{i}.")


def _in_layers(layers: tuple[LayerSpec, ...]) -> int:
    return sum(layer.parameters + layer.float32_parameters for layer in layers)


def _plain_bytes(weights: Iterable[Weight], dtype: str) -> int:
    """Without quantisation."""
    return sum(weight.num_elements * (4 if weight.in_float32 else DTYPE_BYTES[dtype]) for weight in weights)


def saved_bytes(weights: Iterable[Weight], quantization: AnyQuantization | None, dtype: str) -> int:
    """What quantisation saves of `weights`, which are named as in the checkpoint, in a model that runs in `dtype`."""
    if quantization is None:
        return 0
    return sum(
        weight.num_elements * DTYPE_BYTES[dtype] - quantization.num_bytes(weight)
        for weight in weights
        if quantization.quantises(weight)
    )
