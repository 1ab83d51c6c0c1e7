"""ModelSpec: everything that the plan needs to know of a model, read from its config.json alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from ostinato.plan.calls import NO_CALLS, Calls
from ostinato.plan.layers import AttentionSpec, LayerSpec
from ostinato.plan.quantization import AnyQuantization, BlockQuantization
from ostinato.plan.rope import RopeSpec
from ostinato.plan.states import NO_STATE, Mixer, StateArray, StateSpec
from ostinato.plan.stored_weights import StoredWeights
from ostinato.plan.vision import VisionSpec
from ostinato.plan.weights import Weight, num_elements

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


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
        """Of `weight_bytes`, those that stay in the pages of a file: of a prediction head, the model's own file."""
        if self.model is not None:
            return self.model.mapped_bytes
        chosen = self.quantization
        return chosen.mapped_bytes(self.table) if isinstance(chosen, BlockQuantization) else 0

    @property
    def table(self) -> Iterator[Weight]:
        """All weights of a prediction head, as the checkpoint names them."""
        yield from self.weights
        yield from _under(self.layers, "mtp.")


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
    def quantizations(self) -> list[AnyQuantization]:
        """Its own, and that of a draft model, where they are quantised."""
        draft = None if self.drafter is None else self.drafter.model
        return [each.quantization for each in (self, draft) if each is not None and each.quantization is not None]

    @property
    def is_in_order(self) -> bool:
        """Whether products put their inputs in another order first."""
        return any(each.in_order for each in self.quantizations)

    @property
    def gathers_inputs(self) -> bool:
        """Whether ranks give each other the inputs that they share, whose groups have an order of their own."""
        draft = None if self.drafter is None else self.drafter.model
        shared = [each.quantization for each in (self, draft) if each is not None and each.ranks > 1]
        return any(each is not None and each.in_order for each in shared)

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
