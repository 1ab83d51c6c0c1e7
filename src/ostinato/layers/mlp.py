"""Feed-forward layers: plain, gated, the weights of experts, and the router of DeepSeek-V3.

The router (arXiv 2412.19437, section 2.1.2) is that of Nemotron-H and Kimi Linear too.
"""

from __future__ import annotations

from typing import Any, Protocol

from ostinato.layers.linear import Linear, PackedLinear
from ostinato.layers.module import ModelBuilder, Module, Multiplier, QuantizableMatrix
from ostinato.layers.norm import sigmoid_gate
from ostinato.ops.step_inputs import Array
from ostinato.plan.layer_specs import ExpertsSpec


class MLP(Module):
    """down_proj(activation(up_proj(x))) + residual."""

    def __init__(
        self, build: ModelBuilder, hidden_size: int, intermediate_size: int, activation: str, bias: bool = False
    ) -> None:
        super().__init__()
        self.activation = activation
        self.up_proj = Linear(build, hidden_size, intermediate_size, bias)
        self.down_proj = Linear(build, intermediate_size, hidden_size, bias, cuts_inputs=True)

    def forward(self, x: Array, residual: Array) -> Array:
        """Apply the MLP to `x` and add `residual`, both [tokens, hidden] -> [tokens, hidden]."""
        return self.down_proj(self.up_proj(x, activation=self.activation), residual)


class GatedMLP(Module):
    """down_proj(silu(gate_proj(x)) * up_proj(x)) + residual; the activation `geglu` has tanh GELU in place of SiLU.

    `gate_multiplier` and `down_multiplier` scale the gate before its activation and the result (Falcon-H1). `names` are
    the checkpoint's for gate, up and down. If gate and up are what `is_one_tensor` in it, that is `gate_up_proj`
    (Phi-3). It may also have them as one tensor of this `whole_name`. `clamp` is that of `ops.gated_activation`.
    """

    def __init__(
        self,
        build: ModelBuilder,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        gate_multiplier: float = 1.0,
        down_multiplier: float = 1.0,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        activation: str = "swiglu",
        is_one_tensor: bool = False,
        whole_name: str = "",
        clamp: tuple[float, float, float] | None = None,
    ) -> None:
        super().__init__()
        self.ops, self.clamp = build.ops, clamp
        self.activation = None if clamp is not None else activation
        size = intermediate_size
        multiplier: Multiplier = 1.0 if gate_multiplier == 1.0 else ((gate_multiplier, size), (1.0, size))
        parts: tuple[tuple[str, int], ...] = ((names[0], size), (names[1], size))
        segments: tuple[int, ...] = ()
        if is_one_tensor:
            parts, segments = (("gate_up_proj", 2 * size),), (size, size)
        facts: dict[str, Any] = {"segments": segments}
        if whole_name:
            facts = {"segments": (size, size), "whole_name": f"{whole_name}.weight"}
        self.gate_up = PackedLinear(build, hidden_size, parts, bias, multiplier, is_gated=True, **facts)
        self.down_proj = Linear(build, size, hidden_size, bias, down_multiplier, cuts_inputs=True)
        self.token_gate = sigmoid_gate(build, size)
        self.names = {"down_proj": names[2]}

    def forward(self, x: Array, residual: Array | None, gate: Array | None = None) -> Array:
        """Apply the MLP to `x` and add `residual`, both [tokens, hidden] -> [tokens, hidden].

        The sigmoid of `gate` [tokens, 1] multiplies the MLP's output before it is added.
        """
        inner = self.gate_up(x, activation=self.activation)
        if self.clamp is not None:
            inner = self.ops.gated_activation(inner, "silu", self.clamp)
        if gate is not None:
            inner = self.token_gate(inner, gate)
        return self.down_proj(inner, residual)


STACKED = ("gate_up_proj", "down_proj")
"""Usual names of a layer's experts in a checkpoint, if they are stacks."""


class Experts(Module):
    """Stacked experts of a layer: inward and outward matrices, [experts, out, in] each.

    With a gated activation, the gates come first in the inward matrix. In the checkpoint each expert has its own
    tensors, `{i}.up_proj.weight`, `{i}.down_proj.weight` and, with a gated activation, `{i}.gate_proj.weight`, or
    others by the `names` for gate, up and down. Or it has two stacks like these, with the names `stacked_as`. If it
    `may_be_stacked`, it has either form.

    With `bias`, stacks have biases, whose names end with `_bias`. `clamp` is that of `ops.moe`.
    """

    def __init__(
        self,
        build: ModelBuilder,
        spec: ExpertsSpec,
        activation: str,
        stacked_as: tuple[str, str] | None = None,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        may_be_stacked: bool = False,
        bias: bool = False,
        clamp: tuple[float, float, float] | None = None,
    ) -> None:
        super().__init__()
        self.ops = build.ops
        self.clamp = clamp
        self.rank = build.rank
        self.activation = activation
        halves = (spec.intermediate_size,) * 2 if spec.is_gated else ()
        inward, outward = names[:2] if spec.is_gated else names[1:2], names[2:]
        experts = range(spec.num_experts)
        stored = [tuple(f"{i}.{name}.weight" for i in experts for name in each) for each in (inward, outward)]
        is_stack = stacked_as is not None and not may_be_stacked
        if stacked_as is not None and is_stack:
            stored = [(name,) for name in stacked_as]
        instead = stacked_as if stacked_as is not None and may_be_stacked else ("", "")
        shapes = ((spec.num_experts, spec.inner_size, spec.size), (spec.num_experts, spec.size, spec.intermediate_size))
        self.up, self.down = (
            Stack(
                build,
                *shape,
                role="experts",
                can_be_quantised=True,
                names=own,
                quantized_with=other,
                quantized_with_in_size=other_shape[-1],
                is_stack=is_stack,
                whole_name=name,
                segments=segments,
            )
            for shape, other_shape, own, other, name, segments in zip(
                shapes, reversed(shapes), stored, reversed(stored), instead, (halves, ()), strict=True
            )
        )
        self.up_bias: Array | None = None
        self.down_bias: Array | None = None
        if bias:
            assert stacked_as is not None, "stacks have biases"
            up_name, down_name = (f"{name}_bias" for name in stacked_as)
            facts: dict[str, Any] = {"role": "bias", "in_float32": True}
            count, inner = spec.num_experts, spec.inner_size
            self.up_bias = self.declare(build, "up_bias", count, inner, names=(up_name,), segments=halves, **facts)
            self.down_bias = self.declare(build, "down_bias", count, spec.size, names=(down_name,), **facts)

    def forward(self, x: Array, choices: Array, residual: Array | None = None) -> Array:
        """Apply the chosen experts to `x` and add `residual`, both [tokens, in] -> [tokens, in].

        `choices` [tokens, 2, k] is the result of `ops.route`.
        """
        tensors = (x, choices) if residual is None else (x, choices, residual)
        if self.rank.of == 1:
            return self.ops.hook.split("moe", self._run, tensors)
        # Each rank has a part of every expert's width, and the first rank adds the residual.
        part = self.ops.hook.split("moe", self._run, tensors if self.rank.leads else (x, choices))
        return self.ops.all_reduce(part)

    def _run(self, x: Array, choices: Array, residual: Array | None = None) -> Array:
        up, down = self.up, self.down
        quantization: tuple[Any, ...] = ()
        if up.quantization:
            quantization = (up.weight_scale, down.weight_scale, up.group_size, up.blocks, down.blocks)
        # The sum over ranks has the outward bias once.
        biases = (self.up_bias, self.down_bias if self.rank.leads else None)
        further: dict[str, Any] = {}
        if self.up_bias is not None:
            further = dict(zip(("up_bias", "down_bias"), biases, strict=True))
        if self.clamp is not None:
            further["clamp"] = self.clamp
        return self.ops.moe(x, choices, up.weight, down.weight, self.activation, residual, *quantization, **further)


class Stack(QuantizableMatrix):
    """One matrix of every expert. It is quantised together with the tensors `quantized_with`, or not at all."""

    is_in_checkpoint = False


class RoutedMLP(Module):
    """Experts of a softmax router, plus the residual.

    If it `normalizes`, the weights of the chosen experts add up to 1 before they are multiplied by `scaling`. `router`
    is a checkpoint's name of the router, and `stored` are the arguments of `Experts` for their places in it.
    """

    def __init__(
        self,
        build: ModelBuilder,
        spec: ExpertsSpec,
        normalizes: bool = True,
        scaling: float = 1.0,
        router: str = "gate",
        **stored: Any,
    ) -> None:
        super().__init__()
        self.names = {"gate": router}
        self.op, self.top_k, self.over_all, self.scaling = build.ops.route, spec.top_k, not normalizes, scaling
        self.gate = Linear(build, spec.size, spec.num_experts, role="router")
        self.experts = Experts(build, spec, "swiglu", **stored)

    def forward(self, x: Array, residual: Array | None) -> Array:
        """Apply the experts to `x` and add `residual`, both [tokens, hidden] -> [tokens, hidden]."""
        how = {"softmax_over_all": self.over_all, "scaling": self.scaling}
        return self.experts(x, self.op(x, self.gate.weight, None, self.top_k, **how), residual)


class Routing(Protocol):
    """Parameters of the choice of experts by the sigmoids of their scores, as `ops.route` defines them."""

    @property
    def experts(self) -> ExpertsSpec: ...
    @property
    def num_groups(self) -> int: ...
    @property
    def top_groups(self) -> int: ...
    @property
    def normalize(self) -> bool: ...
    @property
    def scaling(self) -> float: ...


class SigmoidRouter(Module):
    """Router that scores experts in float32; its correction bias influences the choice, not the weights."""

    def __init__(
        self, build: ModelBuilder, hidden_size: int, moe: Routing, bias_name: str = "e_score_correction_bias"
    ) -> None:
        super().__init__()
        self.op, self.moe = build.ops.route, moe
        experts, facts = moe.experts.num_experts, {"names": (bias_name,), "in_float32": True}
        self.weight = self.declare(build, "weight", experts, hidden_size, role="router")
        self.e_score_correction_bias = self.declare(build, "e_score_correction_bias", experts, role="bias", **facts)

    def forward(self, x: Array) -> Array:
        """Return the ids of experts and their weights, [tokens, hidden] -> [tokens, 2, top_k]."""
        moe = self.moe
        how = (moe.experts.top_k, moe.num_groups, moe.top_groups, moe.normalize, moe.scaling)
        return self.op(x, self.weight, self.e_score_correction_bias, *how)
