"""ModelSpec: everything that the plan needs to know of a model, read from its config.json alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from ostinato.ops.sizes import DTYPE_BYTES
from ostinato.plan.graphs.arena import NO_CALLS, CallTrace
from ostinato.plan.layer_specs import AttentionSpec, LayerSpec, VisionSpec
from ostinato.plan.mixers import NO_STATE, Mixer, StateArray, StateSpec
from ostinato.plan.quantization import AnyQuantization, BlockQuantization, StoredWeights
from ostinato.plan.rope import LayerRope, RopeSpec, resolve_ropes
from ostinato.plan.weights import Weight, elements_on_disk, num_elements

MODEL_DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes in which models run."""


DrafterMethod = Literal["mtp", "draft", "assistant"]


@dataclass(frozen=True)
class TargetSpec:
    """The model that an assistant makes drafts for: one of these architectures, of this hidden size."""

    architectures: tuple[str, ...]
    hidden_size: int
    picked_tokens: int = 0
    """Tokens whose logits alone a draft computes, each from a copy of its row of the LM head; 0: all, from the head."""


@dataclass(frozen=True)
class DrafterSpec:
    """Drafter with its own weights; its layers follow the model's in blocks and slots.

    `mtp`: a prediction head, whose outer `weights` join a token with a hidden state; slots store `hidden_elements` of
    the model's hidden state in addition to the states. `draft`: a second `model`, `hidden_elements` 0. `assistant`: a
    second `model` too, which starts from the hidden state as a head does, and whose layers read the model's keys.
    """

    method: DrafterMethod
    layers: tuple[LayerSpec, ...]
    hidden_elements: int = 0
    weights: tuple[Weight, ...] = ()
    """Weights outside the layers."""
    ops: tuple[str, ...] = ()
    model: ModelSpec | None = None
    quantization: AnyQuantization | None = None
    """Quantization of a prediction head."""
    calls: CallTrace = NO_CALLS
    """Calls for one token of a draft by a prediction head or an assistant."""
    step_calls: CallTrace = NO_CALLS
    """Calls for one token of the target model and of what follows it: a head, or the hidden state that is kept."""
    places: tuple[str, ...] = ()
    """Checkpoint's names of a prediction head's layers."""

    @property
    def starts_from_hidden(self) -> bool:
        """True if a draft starts from the model's last hidden state, so that only decode rows run the drafter."""
        return self.method != "draft"

    @property
    def draft_calls(self) -> CallTrace:
        """Calls for one token of a draft."""
        return self.model.calls if self.model is not None and self.method == "draft" else self.calls

    @property
    def state(self) -> StateSpec:
        """The part of a slot besides those of the layers: the model's last hidden state, if drafts start from it."""
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
        """Return the weights' bytes in `dtype`, without a head's embedding and LM head, which are the model's."""
        if self.model is not None:
            return self.model.weight_bytes(dtype)
        whole = _plain_bytes(self.weights, dtype) + sum(_plain_bytes(layer.weights, dtype) for layer in self.layers)
        return whole - saved_bytes(self.table, self.quantization, dtype)

    @property
    def mapped_bytes(self) -> int:
        """The part of `weight_bytes` that stays in the pages of a file; for a prediction head, the model's own file."""
        if self.model is not None:
            return self.model.mapped_bytes
        chosen = self.quantization
        return chosen.mapped_bytes(self.table) if isinstance(chosen, BlockQuantization) else 0

    @property
    def table(self) -> Iterator[Weight]:
        """All weights of a prediction head, under the checkpoint's names."""
        yield from self.weights
        for place, layer in zip(self.places, self.layers, strict=False):
            yield from (weight.with_prefix(f"{place}.") for weight in layer.weights)


@dataclass(frozen=True)
class ModelSpec:
    """A model in the plan.

    `hyperparameters` and `encoder_hyperparameters` are the architecture's own dataclasses, for its file in models/.
    """

    architecture: str
    dtype: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int | None
    tied_embeddings: bool
    layers: tuple[LayerSpec, ...]
    ssm_state_dtype: str | None
    """`mamba_ssm_cache_dtype` of the checkpoint, if it names one."""
    rope: RopeSpec | None
    hyperparameters: Any
    sharded_dims: tuple[str, ...] | None = None
    """Paths of the hyperparameters that are widths of MLPs and experts, which ranks share.

    The layers' specs have the other sharded sizes. None if ranks cannot share models of the architecture.
    """
    ops: tuple[str, ...] = ()
    """Names of the ops/ functions that the model calls."""
    calls: CallTrace = NO_CALLS
    """Calls for one token of a decode row."""
    weights: tuple[Weight, ...] = ()
    """Weights outside the layers: embedding, final norm and, if not tied, the LM head."""
    head: DrafterSpec | None = None
    """Prediction head of the checkpoint."""
    drafter: DrafterSpec | None = None
    """Drafter, if drafts are made by something with weights."""
    stored_quantization: StoredWeights | None = None
    """Quantization of the checkpoint's weights, if they are quantised."""
    stored_blocks: tuple[tuple[str, int], ...] = ()
    """Bytes of a GGUF file's tensors by type."""
    stored_formats: tuple[tuple[str, str], ...] = ()
    """Names of a GGUF file's tensors in blocks, as the checkpoint names them, and the format of each."""
    stored_runs: tuple[tuple[str, ...], ...] = ()
    """Runs of these tensors that directly follow one another in the file, with rows in the checkpoint's order."""
    quantization: AnyQuantization | None = None
    """Quantization of the weights while the model runs, including a prediction head's."""
    vision: VisionSpec | None = None
    """Encoder of images, for models that have one."""
    encoder_hyperparameters: Any = None
    ranks: int = 1
    """Number of processes that share the model; the sizes above are those of one."""
    unsharded: ModelSpec | None = None
    """The whole model, if it is sharded."""
    given_tokens: int | None = None
    """Number of token ids that have a text in the tokenizer given in place of the checkpoint's, if one was given."""
    other_ropes: tuple[RopeSpec, ...] = ()
    """Further rotary embeddings, of the attention whose `rope` is 1 and more."""
    backbone: str = "model."
    """Prefix of the names of the layers in the checkpoint."""
    is_prefix_lm: bool = False
    """True if the tokens of a prompt see each other in both directions, so that one step computes all of them."""
    num_streams: int = 1
    """Hidden vectors of a token that are alive through a layer: the residual stream, and others beside it."""
    left_out: str | None = None
    """The part of the checkpoint that is not run, with the reason; None if all of it is."""
    encoder_file: str | None = None
    """Name of the file with the encoder of images, if a GGUF model's is beside the text's."""
    target: TargetSpec | None = None
    """The model that it makes drafts for, and without which it cannot run; None for a model of its own."""

    def with_fixed_ropes(self, max_model_len: int) -> ModelSpec:
        """Return the spec with rotary embeddings that serve requests of up to `max_model_len` tokens."""
        ropes, _ = resolve_ropes(self.ropes, max_model_len)
        return replace(self, rope=ropes[0], other_ropes=ropes[1:]) if ropes else self

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """All rotary embeddings; `AttentionSpec.rope` is an index into them."""
        return () if self.rope is None else (self.rope, *self.other_ropes)

    def with_layers(self, ropes: Iterable[RopeSpec]) -> tuple[LayerRope, ...]:
        """Return `ropes`, which are the model's as resolved, each with the layers that use it."""
        users: list[list[int]] = [[] for _ in self.ropes]
        for number, layer in enumerate(self.layers):
            if users and layer.attention is not None and layer.attention.rotates:
                users[layer.attention.rope].append(number)
        return tuple(LayerRope(tuple(layers), rope) for layers, rope in zip(users, ropes, strict=True))

    def rope_of(self, attention: AttentionSpec) -> RopeSpec | None:
        """Return the rotary embedding that the attention uses, if it uses one."""
        return self.ropes[attention.rope] if attention.rotates and self.ropes else None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def cached_layers(self) -> tuple[LayerSpec, ...]:
        """All layers with a part in blocks and slots: the model's, followed by the drafter's."""
        return self.layers if self.drafter is None else self.layers + self.drafter.layers

    @property
    def prefill_layers(self) -> tuple[LayerSpec, ...]:
        """The `cached_layers` that compute prompts too, as an assistant's do not."""
        reads = self.drafter is not None and self.drafter.method == "assistant"
        return self.layers if reads else self.cached_layers

    @property
    def attention_layers(self) -> tuple[AttentionSpec, ...]:
        """Attention of `cached_layers`."""
        return tuple(layer.attention for layer in self.cached_layers if layer.attention is not None)

    @property
    def storing_layers(self) -> tuple[AttentionSpec, ...]:
        """Attention of `cached_layers` that stores keys and values of its own."""
        return tuple(attention for attention in self.attention_layers if attention.keys_of is None)

    @property
    def state_layers(self) -> tuple[Mixer, ...]:
        """Mixers of `cached_layers`."""
        return tuple(layer.mixer for layer in self.cached_layers if layer.mixer is not None)

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """All parts of a slot: those of the state layers, and the hidden state that a prediction head needs."""
        hidden = NO_STATE if self.drafter is None else self.drafter.state
        return (*(mixer.state for mixer in self.state_layers), *([hidden] if hidden.arrays else []))

    @property
    def keeps_state(self) -> bool:
        """True if a request needs slots, so that its prefix can only be found again at a checkpoint."""
        return bool(self.states)

    @property
    def has_recurrence(self) -> bool:
        """True if any state has the dtype of `ssm_state_dtype`."""
        return any(state.recurrent_elements for state in self.states)

    @property
    def supports_all_checkpoints(self) -> bool:
        """True if every state layer can export its state at any block boundary of a prompt, as mode `all` needs."""
        return all(mixer.scan_writes_states for mixer in self.state_layers)

    @cached_property
    def num_parameters(self) -> int:
        """Number of the model's parameters, its encoder's included and its drafter's not, each counted once."""
        vision = 0 if self.vision is None else self.vision.parameters
        return num_elements(self.weights) + _in_layers(self.layers) + elements_on_disk(self.table) + vision

    @property
    def disk_bytes(self) -> int:
        """Bytes of the tables, which are no part of `weight_bytes`."""
        return elements_on_disk(self.table) * DTYPE_BYTES[self.dtype]

    def weight_bytes(self, dtype: str) -> int:
        """Return the weights' bytes in `dtype`, those of its encoder included and of its drafter not."""
        whole = _plain_bytes(self.weights, dtype) + sum(_plain_bytes(layer.weights, dtype) for layer in self.layers)
        if self.vision is not None:
            whole += _plain_bytes(self.vision.weights, dtype)
        return whole - saved_bytes(self.table, self.quantization, dtype)

    @property
    def quantizations(self) -> list[AnyQuantization]:
        """Quantizations of the model and of a draft model, if they are quantised."""
        draft = None if self.drafter is None else self.drafter.model
        return [spec.quantization for spec in (self, draft) if spec is not None and spec.quantization is not None]

    @property
    def is_in_order(self) -> bool:
        """True if matmuls must reorder their inputs first (act-order)."""
        return any(quantization.has_act_order for quantization in self.quantizations)

    @property
    def gathers_inputs(self) -> bool:
        """True if ranks must gather the inputs that are sharded among them, because groups are in act-order."""
        draft = None if self.drafter is None else self.drafter.model
        shared = [spec.quantization for spec in (self, draft) if spec is not None and spec.ranks > 1]
        return any(each is not None and each.has_act_order for each in shared)

    @property
    def mapped_bytes(self) -> int:
        """The part of `weight_bytes` that stays in the pages of the checkpoint's file."""
        chosen = self.quantization
        return chosen.mapped_bytes(self.table) if isinstance(chosen, BlockQuantization) else 0

    @property
    def table(self) -> Iterator[Weight]:
        """All of the model's own weights, under the checkpoint's names."""
        yield from self.weights
        yield from _under(self.layers, self.backbone)
        if self.vision is not None:
            yield from self.vision.weights

    @property
    def lm_head(self) -> Weight:
        """Matrix of the LM head, which may be the embedding."""
        return next(weight for weight in self.weights if weight.is_lm_head)

    @property
    def linears(self) -> Iterator[Weight]:
        """Matrices that can be quantised, by the checkpoint's names: the layers' except experts, and the LM head."""
        in_layers = _under(self.layers, self.backbone)
        yield from (weight for weight in in_layers if weight.can_be_quantised and weight.role != "experts")
        yield self.lm_head

    @property
    def experts(self) -> Iterator[Weight]:
        """Matrices of the layers' experts, which can be quantised too."""
        yield from (weight for weight in _under(self.layers, self.backbone) if weight.role == "experts")


def _under(layers: tuple[LayerSpec, ...], prefix: str) -> Iterator[Weight]:
    for i, layer in enumerate(layers):
        for weight in layer.weights:
            yield weight.with_prefix(f"{prefix}layers.{i}.")


def _in_layers(layers: tuple[LayerSpec, ...]) -> int:
    return sum(layer.parameters + layer.float32_parameters for layer in layers)


def _plain_bytes(weights: Iterable[Weight], dtype: str) -> int:
    """Return the bytes in memory without quantisation."""
    in_memory = (weight for weight in weights if not weight.stays_on_disk)
    return sum(weight.num_elements * DTYPE_BYTES["float32" if weight.in_float32 else dtype] for weight in in_memory)


def saved_bytes(weights: Iterable[Weight], quantization: AnyQuantization | None, dtype: str) -> int:
    """Return the bytes that quantisation saves in `dtype`; `weights` have the checkpoint's names."""
    if quantization is None:
        return 0
    return sum(
        weight.num_elements * DTYPE_BYTES[dtype] - quantization.num_bytes(weight)
        for weight in weights
        if quantization.quantises(weight)
    )
