"""Hyper-connections: a residual of several streams, from which a part of a layer takes a mix and which it adds to.

They are those of Zhu et al. 2024 (arXiv 2409.19606) in the form of Qwen4, and those of Xie et al. 2025 (arXiv
2512.24880), whose mix of the streams is doubly stochastic, in the form of GLM-5.3. The streams of a token are side by
side, [tokens, streams * hidden].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ostinato.layers.linear import Linear
from ostinato.layers.module import ModelBuilder, Module
from ostinato.layers.norm import sigmoid_gate

if TYPE_CHECKING:
    from ostinato.ops.dispatch import Ops
    from ostinato.ops.step_inputs import Array


class StreamNorm(Module):
    """RMS norm of each stream, with a weight of its own that the checkpoint stores less 1."""

    def __init__(self, build: ModelBuilder, hidden_size: int, streams: int, eps: float) -> None:
        super().__init__()
        self.ops, self.size, self.eps = build.ops, hidden_size, eps
        stored: dict[str, Any] = {"stored_minus_one": True, "stored_shape": (streams * hidden_size,)}
        self.weight = self.declare(build, "weight", streams, hidden_size, role="norm", **stored)

    def forward(self, x: Array) -> Array:
        """Normalise [tokens, streams * hidden] -> [tokens, streams * hidden]."""
        normed: Array | None = None
        for stream in range(self.weight.shape[0]):
            part = x[:, stream * self.size : (stream + 1) * self.size]
            part = self.ops.rms_norm(part, self.weight[stream], self.eps, 1.0)
            normed = part if normed is None else self.ops.concat(normed, part)
        assert normed is not None, "there are streams"
        return normed


class HyperConnection(Module):
    """Mix of the streams, and with `injects` the gates with which a result is added to each of them."""

    def __init__(
        self, build: ModelBuilder, hidden_size: int, streams: int, rank: int, eps: float, *, injects: bool = True
    ) -> None:
        super().__init__()
        self.ops, self.size, self.streams = build.ops, hidden_size, streams
        width = streams * hidden_size
        self.hc_norm = StreamNorm(build, hidden_size, streams, eps)
        self.input_mix_weight_down = Linear(build, width, rank, multiplier=1 / streams)
        self.input_mix_weight_up = Linear(build, rank, width)
        self.block_inject_weight: Linear | None = None
        if injects:
            self.block_inject_weight = Linear(build, width, streams, multiplier=1 / streams, can_be_quantised=False)
        self.gate = sigmoid_gate(build, width)
        self.share = build.constant([1 / streams], "float32").reshape(1, 1)
        self.two = build.constant([2.0], "float32").reshape(1, 1)

    def forward(self, x: Array) -> Array:
        """Return the mix of the streams, [tokens, streams * hidden] -> [tokens, hidden]."""
        return self.mix(x)[0]

    def mix(self, x: Array) -> tuple[Array, Array]:
        """Return the mix of the streams, [tokens, hidden], and the normed streams that the gates are computed from."""
        normed = self.hc_norm(x)
        low = self.input_mix_weight_down(normed, activation="silu")
        gated = self.gate(normed, self.input_mix_weight_up(low))
        mixed = gated[:, : self.size]
        for begin in range(self.size, x.shape[1], self.size):
            mixed = self.ops.add(mixed, gated[:, begin : begin + self.size])
        return self.ops.multiply(mixed, self.share), normed

    def inject(self, x: Array, y: Array, normed: Array) -> Array:
        """Add `y` [tokens, hidden] times its gate to each stream of `x` -> like `x`; `normed` is that of `mix`."""
        assert self.block_inject_weight is not None, "it injects"
        wide = repeat_streams(self.ops, self.ops.multiply(y, self.two), self.streams)
        return self.ops.add(x, self.gate(wide, self.block_inject_weight(normed)))


class ManifoldHyperConnection(Module):
    """Mix of the streams, and the weights with which they and a result become the next streams (`ops.mhc_weights`)."""

    def __init__(
        self, build: ModelBuilder, hidden_size: int, streams: int, norm_eps: float, eps: float, iterations: int
    ) -> None:
        super().__init__()
        self.ops, self.streams, self.how = build.ops, streams, (streams, norm_eps, eps, iterations)
        rows = (2 + streams) * streams
        self.fn = self.declare(build, "fn", rows, streams * hidden_size, role="router")
        self.base = self.declare(build, "base", rows, role="bias", in_float32=True)
        self.scale = self.declare(build, "scale", 3, role="bias", in_float32=True)

    def mix(self, x: Array) -> tuple[Array, Array]:
        """Return the mix of the streams `x`, [tokens, hidden], and the weights for `inject`."""
        weights = self.ops.mhc_weights(x, self.fn, self.base, self.scale, *self.how)
        mixed = self.ops.mix_streams(x, None, weights[:, : self.streams], self.streams)
        return mixed, weights[:, self.streams :]

    def inject(self, x: Array, y: Array, weights: Array) -> Array:
        """Return the next streams, like `x`, from the streams and the result `y` [tokens, hidden]."""
        return self.ops.mix_streams(x, y, weights, self.streams)


def repeat_streams(ops: Ops, x: Array, streams: int) -> Array:
    """Return streams that are all `x`, [tokens, hidden] -> [tokens, streams * hidden]."""
    wide = x
    for _ in range(streams - 1):
        wide = ops.concat(wide, x)
    return wide
