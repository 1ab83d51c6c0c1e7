"""LayerSpec: one layer of a model as the plan sees it, with its attention and its experts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ostinato.plan.states import Mixer
from ostinato.plan.weights import Weight, num_elements


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
