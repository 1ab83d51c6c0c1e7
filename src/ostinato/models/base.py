"""Language models of any architecture: blocks of a mixer and an MLP, the pass through them, and prediction heads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ostinato.layers.attention import Attention, AxialRotary, Rotary
from ostinato.layers.hyper_connection import HyperConnection
from ostinato.layers.latent_attention import LatentAttention
from ostinato.layers.linear import Embedding, Linear
from ostinato.layers.mamba import Mamba2Mixer
from ostinato.layers.module import ModelBuilder, Module, ModuleList, QuantizableMatrix
from ostinato.layers.norm import LayerNorm, PlainRMSNorm, RMSNorm, sigmoid_gate
from ostinato.plan.layer_specs import LayerSpec, VisionSpec
from ostinato.plan.mixers import Mamba2Spec
from ostinato.plan.model import ModelSpec
from ostinato.plan.rope import axes, inverse_frequencies
from ostinato.plan.tensor_parallel import Rank, vocabulary_part

if TYPE_CHECKING:
    from ostinato.ops.step_inputs import Array, EncoderInputs, LayerCache, StepInputs


class Backbone(Module):
    """Embedding, blocks and final norm. `names` are the checkpoint's for the attributes, if they differ.

    `final_norm` is the norm after the blocks, if it is no RMS norm. If it `is_wide`, the residual stream is in float32.
    """

    def __init__(
        self,
        build: ModelBuilder,
        spec: ModelSpec,
        make_block: Callable[[LayerSpec], Module],
        norm_eps: float,
        names: dict[str, str] | None = None,
        embedding_multiplier: float = 1.0,
        norm_plus_one: bool = False,
        final_norm: LayerNorm | PlainRMSNorm | HyperConnection | None = None,
        is_wide: bool = False,
    ) -> None:
        super().__init__()
        self.names = names or {}
        self.embed_tokens = Embedding(
            build, spec.vocab_size, spec.hidden_size, embedding_multiplier, spec.tied_embeddings, is_wide
        )
        self.layers = ModuleList(make_block(layer) for layer in spec.layers)
        self.norm = final_norm or RMSNorm(build, spec.hidden_size, norm_eps, norm_plus_one)
        self.rotaries = ModuleList(Rotary(build, rope) for rope in spec.ropes if rope.sections is None)
        self.ropes = {
            block: 0 if layer.attention is None else layer.attention.rope
            for layer, block in zip(spec.layers, self.layers, strict=True)
        }
        """Index in `rotaries` of each block's rotary embedding."""
        self.stream_size = spec.hidden_size
        """Elements of a token between blocks."""
        self.inject_media = None if spec.vision is None else build.ops.inject_media

    def forward(self, inputs: StepInputs, memory: Sequence[LayerCache]) -> Array:
        """Compute the final normed hidden states of a step, [tokens, hidden].

        `memory` begins with that of the layers. If the model takes images, it ends with that of the encoder's outputs.
        """
        return self.transform(self.embed(inputs, memory), inputs, memory[: len(self.layers)])

    def embed(self, inputs: StepInputs, memory: Sequence[LayerCache]) -> Array:
        """Return the embeddings of the step's tokens, or the encoder's outputs for tokens of images, [tokens, hidden].

        `memory` is that of `forward`.
        """
        x = self.embed_tokens(inputs.token_ids)
        if self.inject_media is None:
            return x
        return self.inject_media(x, inputs.media_cells, memory[-1].media, 0, False)

    def transform(self, x: Array, inputs: StepInputs, memory: Sequence[LayerCache]) -> Array:
        """Compute the part of `forward` after the embedding, [tokens, hidden] -> [tokens, hidden]."""
        angles = [rotary(inputs.positions) for rotary in self.rotaries] or [None]
        for block, layer_memory in zip(self.layers, memory, strict=True):
            x = block(x, angles[self.ropes[block]], inputs, layer_memory)
        return self.norm(x)


class HiddenStateKeeper(Module):
    """Last part of a model whose drafts start from its hidden state, which it writes into the slots."""

    def __init__(self, build: ModelBuilder) -> None:
        super().__init__()
        self.hook, self.token_shift = build.ops.hook, build.ops.token_shift

    def previous_hidden(self, hidden: Array, inputs: StepInputs, memory: LayerCache) -> Array:
        """Return the model's hidden state before each token, from those that it has just computed.

        Both are [tokens, hidden]. The last hidden state of each row goes to `memory`.
        """
        return self.hook.split("state", self._shift, (hidden,), inputs, memory)

    def _shift(self, hidden: Array, inputs: StepInputs, memory: LayerCache) -> Array:
        return self.token_shift(
            hidden,
            memory.states["hidden"],
            inputs.row_starts,
            inputs.read_slots,
            inputs.write_slots,
            inputs.num_decode_rows,
            inputs.checkpoints,
        )


JOIN_NAMES = {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "eh_proj"}
"""Usual names of the parts of a prediction head's join in a checkpoint."""


class PredictionHead(HiddenStateKeeper):
    """Predictor of the token after next, from a hidden state of the model (after its final norm) and the next token.

    It has a join of both, layers, and a norm. Its entry for token p is computed from the hidden state at p - 1 and
    token p, and its keys and values are at position p; position 0 has none. `memory` is that of its layers, followed by
    one whose state `hidden` [slots, 1, hidden] keeps the model's last hidden state.
    """

    def __init__(
        self,
        build: ModelBuilder,
        spec: ModelSpec,
        layers: Sequence[LayerSpec],
        make_block: Callable[[LayerSpec, int], Module],
        *,
        names: dict[str, str],
        first: int = 0,
        norm_plus_one: bool = False,
    ) -> None:
        """Build the head; `make_block` takes a layer and the first position whose key its attention sees.

        Blocks with attention have `store_keys`. `names` are the checkpoint's, and `first` its number of the first
        layer. With `norm_plus_one` it stores the norms less 1.
        """
        super().__init__(build)
        size, eps = spec.hidden_size, spec.hyperparameters.norm_eps
        self.names = names
        self.concat = build.ops.concat
        self.pre_fc_norm_embedding = RMSNorm(build, size, eps, norm_plus_one)
        self.pre_fc_norm_hidden = RMSNorm(build, size, eps, norm_plus_one)
        self.fc = Linear(build, 2 * size, size)
        self.blocks: ModuleList[Module] = ModuleList((make_block(layer, 1) for layer in layers), first)
        self.norm = RMSNorm(build, size, eps, norm_plus_one)
        self.last_attention = max((i for i, layer in enumerate(layers) if layer.attention is not None), default=-1)
        self.is_axial = spec.rope is not None and spec.rope.sections is not None
        self.rotary: Rotary | AxialRotary | None = None
        if spec.rope is not None and self.is_axial:
            self.rotary = AxialRotary(build, axes(spec.rope), *inverse_frequencies(spec.rope))
        elif spec.rope is not None:
            self.rotary = Rotary(build, spec.rope)

    def forward(self, hidden: Array, embedded: Array, inputs: StepInputs, memory: Sequence[LayerCache]) -> Array:
        """Return the input of the LM head, and the hidden state for the next, deeper draft.

        `hidden` are the hidden states before the step's tokens, `embedded` the tokens' embeddings, each [tokens,
        hidden]. The LM head turns the result into logits of the tokens after them. For the next draft it takes the
        place of the model's hidden state.
        """
        x, angles = self.join(hidden, embedded), self._angles(inputs)
        for block, layer_memory in zip(self.blocks, memory, strict=False):
            x = block(x, angles, inputs, layer_memory)
        return self.norm(x)

    def update_head_cache(
        self, hidden: Array, embedded: Array, inputs: StepInputs, memory: Sequence[LayerCache]
    ) -> None:
        """Update the head's cache for the step's tokens from the model's new hidden states.

        It writes their keys and values, computed from the hidden state before each token (from the read slot for the
        first), and the last hidden state of each row.
        """
        previous, last = self.previous_hidden(hidden, inputs, memory[-1]), self.last_attention
        if last < 0:
            return
        x, angles = self.join(previous, embedded), self._angles(inputs)
        for block, layer_memory in zip(self.blocks[:last], memory, strict=False):
            x = block(x, angles, inputs, layer_memory)
        self.blocks[last].store_keys(x, angles, inputs, memory[last])

    def _angles(self, inputs: StepInputs) -> Array | None:
        """Return the angles of the step's tokens, None if attention has no positions.

        An entry has the position of its token, and not of the hidden state before it: all differences are the same,
        except across an image's edges.
        """
        if self.rotary is None:
            return None
        return self.rotary(inputs.rope_positions if self.is_axial else inputs.positions)

    def join(self, hidden: Array, embedded: Array) -> Array:
        """Join `hidden` and `embedded`, both [tokens, hidden] -> [tokens, hidden]."""
        return self.fc(self.concat(self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)))


class Block(Module):
    """Attention, a state mixer or both, then an MLP, experts or both.

    Each part of a pair works on one norm of the residual stream and is added to it. `names` are the checkpoint's for
    the attributes, if they differ; a mixer is called `mamba` without an entry. With `norm_plus_one` the checkpoint
    stores the norms less 1.
    """

    def __init__(
        self,
        build: ModelBuilder,
        hidden_size: int,
        norm_eps: float,
        *,
        mlp: Module,
        attention: Attention | LatentAttention | None = None,
        mixer: Module | None = None,
        experts: Module | None = None,
        names: dict[str, str] | None = None,
        norm_plus_one: bool = False,
    ) -> None:
        super().__init__()
        self.names = {"mixer": "mamba", **(names or {})}
        self.input_layernorm = RMSNorm(build, hidden_size, norm_eps, norm_plus_one)
        self.self_attn = attention
        self.mixer = mixer
        self.post_attention_layernorm = RMSNorm(build, hidden_size, norm_eps, norm_plus_one)
        self.mlp = mlp
        self.experts = experts

    def forward(self, x: Array, angles: Array | None, inputs: StepInputs, memory: LayerCache) -> Array:
        """Apply the block, [tokens, hidden] -> [tokens, hidden]."""
        y = self.input_layernorm(x)
        if self.mixer is not None:
            x = self.mixer(y, inputs, memory, x)
        if self.self_attn is not None:
            x = self.self_attn(y, angles, inputs, memory, x)
        y = self.post_attention_layernorm(x)
        x = self.mlp(y, x)
        return x if self.experts is None else self.experts(y, x)

    def store_keys(self, x: Array, angles: Array | None, inputs: StepInputs, memory: LayerCache) -> None:
        """Write the keys and values of attention without computing the block."""
        assert self.self_attn is not None, "only blocks with attention have keys"
        self.self_attn.store(self.input_layernorm(x), inputs, memory, angles)


class SandwichBlock(Block):
    """Attention or a state mixer, then an MLP. Each has a norm before it, and another one between it and the sum."""

    def __init__(
        self,
        build: ModelBuilder,
        hidden_size: int,
        norm_eps: float,
        *,
        norm_plus_one: bool = False,
        **parts: Any,
    ) -> None:
        """Make the norms around the `parts` of a `Block`, which documents the arguments."""
        super().__init__(build, hidden_size, norm_eps, norm_plus_one=norm_plus_one, **parts)
        self.pre_feedforward_layernorm = RMSNorm(build, hidden_size, norm_eps, norm_plus_one)
        self.post_feedforward_layernorm = RMSNorm(build, hidden_size, norm_eps, norm_plus_one)

    def forward(self, x: Array, angles: Array | None, inputs: StepInputs, memory: LayerCache) -> Array:
        """Apply the block, [tokens, hidden] -> [tokens, hidden]."""
        y = self.input_layernorm(x)
        if self.self_attn is not None:
            y = self.self_attn(y, angles, inputs, memory, None)
        if self.mixer is not None:
            y = self.mixer(y, inputs, memory, None)
        x = self.post_attention_layernorm(y, x)
        return self.post_feedforward_layernorm(self.feed_forward(x), x)

    def feed_forward(self, x: Array) -> Array:
        """Return the MLP's result before its last norm, [tokens, hidden] -> [tokens, hidden]."""
        return self.mlp(self.pre_feedforward_layernorm(x), None)


class PostNormBlock(Module):
    """x + norm(attention(x)), and the same with an MLP (OLMo)."""

    def __init__(
        self, build: ModelBuilder, hidden_size: int, norm_eps: float, *, attention: Attention, mlp: Module
    ) -> None:
        super().__init__()
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(build, hidden_size, norm_eps)
        self.mlp = mlp
        self.post_feedforward_layernorm = RMSNorm(build, hidden_size, norm_eps)

    def forward(self, x: Array, angles: Array | None, inputs: StepInputs, memory: LayerCache) -> Array:
        """Apply the block, [tokens, hidden] -> [tokens, hidden]."""
        x = self.post_attention_layernorm(self.self_attn(x, angles, inputs, memory, None), residual=x)
        return self.post_feedforward_layernorm(self.mlp(x, None), residual=x)


class ParallelBlock(Module):
    """x + attention(norm(x)) + mlp(norm(x)), with a layer norm (Cohere)."""

    def __init__(
        self, build: ModelBuilder, hidden_size: int, norm_eps: float, *, attention: Attention, mlp: Module
    ) -> None:
        super().__init__()
        self.input_layernorm = LayerNorm(build, hidden_size, norm_eps, has_bias=False)
        self.self_attn = attention
        self.mlp = mlp

    def forward(self, x: Array, angles: Array | None, inputs: StepInputs, memory: LayerCache) -> Array:
        """Apply the block, [tokens, hidden] -> [tokens, hidden]."""
        y = self.input_layernorm(x)
        return self.mlp(y, self.self_attn(y, angles, inputs, memory, x))


class MixerBlock(Module):
    """x + mixer(norm(x)), the whole layer of a pure state-space model."""

    def __init__(self, build: ModelBuilder, hidden_size: int, norm_eps: float, mixer: Module) -> None:
        super().__init__()
        self.norm = RMSNorm(build, hidden_size, norm_eps)
        self.mixer = mixer

    def forward(self, x: Array, _: None, inputs: StepInputs, memory: LayerCache) -> Array:
        """Apply the block, [tokens, hidden] -> [tokens, hidden] in the dtype of the residual stream.

        A norm rounds the stream to the model's dtype; the sum is in the dtype of the stream.
        """
        return self.mixer(self.norm(x), inputs, memory, x)


def mamba2_mixer(build: ModelBuilder, size: int, spec: Mamba2Spec, hyper: Any, **further: Any) -> Mamba2Mixer:
    """Make a mixer with the biases, limits and epsilon of hyperparameters such as `HybridHyperparameters`."""
    return Mamba2Mixer(
        build,
        size,
        spec,
        eps=hyper.norm_eps,
        proj_bias=hyper.mamba_proj_bias,
        conv_bias=hyper.conv_bias,
        dt_limit=hyper.dt_limit,
        **further,
    )


class CausalLM(Module, ABC):
    """A language model over paged blocks and slots: a backbone and an LM head.

    An architecture's class adds its blocks. Its weights have the names of the checkpoint; if they differ,
    `checkpoint_name` translates.
    """

    transposable: tuple[str, ...] = ()
    """Name suffixes of stacks of matrices that a checkpoint may store transposed. Their shape tells it."""

    transposed: tuple[str, ...] = ()
    """Name suffixes of stacks of matrices that a checkpoint stores transposed, unless they are quantised."""

    in_turns: tuple[str, ...] = ()
    """Name suffixes of experts' weights and biases whose rows are gates and values in turn; here all gates come first.

    This holds for safetensors.
    """

    if_absent: Mapping[str, float] = {}
    """Values of weights that a checkpoint may leave out, by suffixes of their names."""

    derived: Mapping[str, tuple[int, ...]] = {}
    """Values that follow from config.json, by the names of the checkpoint's tensors, which are compared, not loaded."""

    integers: tuple[str, ...] = ()
    """Name suffixes of weights that are permutations of ids. A checkpoint stores them as integers."""

    backbone_type: type[Backbone] = Backbone
    backbone_names: tuple[tuple[str, str], ...] = ()
    """Attributes of the backbone with their names in a checkpoint, if they differ."""
    norm_plus_one = False
    """True if a checkpoint has the final norm's weight less 1."""

    def __init__(
        self,
        build: ModelBuilder,
        spec: ModelSpec,
        *,
        embedding_multiplier: float = 1.0,
        logits_multiplier: float = 1.0,
        logits_cap: float | None = None,
        final_norm: LayerNorm | PlainRMSNorm | HyperConnection | None = None,
        is_wide: bool = False,
    ) -> None:
        """Make the parts. With a `logits_cap` c, logits x are c tanh(x / c); for others see `Backbone`."""
        super().__init__()
        self.build = build
        self.spec = spec
        rows = vocabulary_part(spec.vocab_size, build.rank).rows
        self.logits_cap = logits_cap
        if logits_cap is not None:
            logits_multiplier *= 2 / logits_cap
            self.cap_gate = sigmoid_gate(build, spec.vocab_size)
            self.caps = build.constant([2 * logits_cap] * spec.vocab_size, build.float32)
            self.shift = build.constant([-logits_cap] * spec.vocab_size, build.float32).reshape(1, spec.vocab_size)
        self.logits_scale = build.scale(logits_multiplier, rows, 1.0)
        if not spec.tied_embeddings:
            self.lm_head = Linear(build, spec.hidden_size, rows, is_lm_head=True)
        self.starts = [
            vocabulary_part(spec.vocab_size, Rank(number, build.rank.of)).first for number in range(build.rank.of)
        ]
        """First row of the LM head on each rank."""
        self.images = None if spec.vision is None else self.make_encoder(spec.vision)
        self.names = {"images": ""}  # Most encoders have parts beside the language model.
        norm_eps, names = spec.hyperparameters.norm_eps, dict(self.backbone_names)
        how = (norm_eps, names, embedding_multiplier, self.norm_plus_one, final_norm, is_wide)
        self.model = self.backbone_type(build, spec, self.make_block, *how)
        self.mtp: PredictionHead | None = None
        self.keeper: HiddenStateKeeper | None = None
        if spec.drafter is not None and spec.drafter.method == "mtp":
            self.mtp = self.make_head(spec.drafter.layers)
        elif spec.drafter is not None and spec.drafter.starts_from_hidden:
            self.keeper = HiddenStateKeeper(build)

    @abstractmethod
    def make_block(self, layer: LayerSpec) -> Module:
        """Make a block for `layer`, called with x [tokens, hidden], angles, step and the layer's memory."""

    def make_head(self, layers: Sequence[LayerSpec]) -> PredictionHead:
        """Make the prediction head of these layers, in architectures that have one."""
        raise NotImplementedError

    def make_encoder(self, vision: VisionSpec) -> Module:
        """Make the encoder of images, in architectures that have one."""
        raise NotImplementedError

    @property
    def backbone(self) -> Backbone:
        """Embedding, blocks and final norm."""
        return self.model

    @property
    def embedding(self) -> Embedding:
        return self.model.embed_tokens

    @property
    def head(self) -> PredictionHead | None:
        """Prediction head that makes drafts, if the model was built with one."""
        return self.mtp

    @property
    def encoder(self) -> Module | None:
        """Encoder of images, for models that take them."""
        return self.images

    def encode(self, inputs: EncoderInputs) -> Array:
        """Encode images -> [rows / merge ** 2, hidden_rows, hidden] in the model's dtype.

        The result is the content of the output tokens' cells. Those of prefixes and padding are included, and may be
        anything.
        """
        assert self.encoder is not None, "only a model with an encoder is given images"
        encoded: Array = self.encoder(inputs)
        return encoded

    def forward(self, inputs: StepInputs, memory: Sequence[LayerCache]) -> Array:
        """Compute one step -> final normed hidden states [tokens, hidden].

        It writes keys, values and states of all layers.
        """
        hidden = self.model(inputs, memory)
        behind = memory[len(self.model.layers) : len(memory) - (self.spec.vision is not None)]
        if self.mtp is not None:
            self.mtp.update_head_cache(hidden, self.model.embed(inputs, memory), inputs, behind)
        elif self.keeper is not None:
            self.keeper.previous_hidden(hidden, inputs, behind[-1])
        return hidden

    def compute_logits(self, hidden: Array) -> Array:
        """Return the logits of hidden states, [positions, hidden] -> [positions, vocab] float32.

        If the model is sharded, only the first rank gets all columns.
        """
        head: QuantizableMatrix = self.embedding if self.spec.tied_embeddings else self.lm_head
        scale, out_dtype = self.logits_scale, self.build.float32
        logits = self.build.ops.linear(hidden, head.weight, None, None, None, scale, out_dtype, *head.quantization)
        if self.build.rank.of > 1:
            logits = self.build.ops.gather_columns(logits, self.starts, self.spec.vocab_size)
        return logits if self.logits_cap is None else self._capped(logits)

    def _capped(self, logits: Array) -> Array:
        """Return c tanh(x / c) of logits that are 2 x / c, as 2 c sigmoid(2 x / c) - c."""
        tokens, size = logits.shape
        caps = self.build.repeat(self.caps[:size].reshape(1, 1, size), tokens).reshape(tokens, size)
        return self.build.ops.add(self.cap_gate(caps, logits), self.shift[:, :size])

    def value_if_absent(self, name: str) -> float | None:
        """Return the value of the weight `name` in a checkpoint that leaves it out; None if none may."""
        return next((value for suffix, value in self.if_absent.items() if name.endswith(suffix)), None)

    def checkpoint_name(self, name: str) -> str | None:
        """Return this model's name of the checkpoint's tensor `name`; None for a known tensor that is not loaded."""
        if self.spec.tied_embeddings and name.startswith("lm_head."):
            return None
        # Older checkpoints store the rotary frequencies of each layer, which follow from config.json.
        if name.endswith(".rotary_emb.inv_freq"):
            return None
        return name


class Assistant(CausalLM):
    """A model that only makes drafts for another, its target, from the target's hidden state, keys and values."""

    target_size: int
    """Hidden size of the target."""

    @abstractmethod
    def forward(  # type: ignore[override]
        self, hidden: Array, embedded: Array, inputs: StepInputs, memory: Sequence[LayerCache]
    ) -> Array:
        """Compute a draft's final normed hidden states, [rows, hidden].

        `hidden` are the target's hidden states, or those of `next_hidden`, and `embedded` the target's embeddings of
        the tokens after them, each [rows, target_size]. `memory` is that of the target's layers that each layer reads.
        """

    @abstractmethod
    def next_hidden(self, hidden: Array) -> Array:
        """Return what takes the place of the target's hidden state for the next draft, [rows, target_size].

        `hidden` is the result of `forward`.
        """

    @abstractmethod
    def draft_logits(self, hidden: Array) -> Array:
        """Return the logits of a draft, [rows, vocab] float32, from the result of `forward`."""

    @abstractmethod
    def check_weights(self) -> None:
        """Raise ModelError if loaded weights have values with which no draft can be made."""
