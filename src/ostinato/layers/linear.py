"""Linear layers: plain ones, several packed into one matmul, the embedding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ostinato.layers.module import ModelBuilder, Multiplier, QuantizableMatrix
from ostinato.ops.quant.block_formats import num_bytes, slice_rows
from ostinato.ops.step_inputs import Array
from ostinato.plan.tensor_parallel import vocabulary_part
from ostinato.plan.weights import Role


class Linear(QuantizableMatrix):
    """y = (x W^T + b) * multiplier.

    `multiplier` is one number, or one for each output. `in_multiplier` multiplies x. With `cuts_inputs`, the inputs are
    sharded, and y is the sum over ranks; bias and residual are the first rank's part. `facts` are fields of the
    weight's row in the weight table.
    """

    def __init__(
        self,
        build: ModelBuilder,
        in_size: int,
        out_size: int,
        bias: bool = False,
        multiplier: Multiplier = 1.0,
        in_multiplier: float = 1.0,
        role: Role = "linear",
        cuts_inputs: bool = False,
        **facts: Any,
    ) -> None:
        facts.setdefault("can_be_quantised", role == "linear")
        super().__init__(build, out_size, in_size, role=role, **facts)
        self.op = build.ops.linear
        self.is_summed = cuts_inputs and build.rank.of > 1
        self.leads, self.all_reduce = build.rank.leads, build.ops.all_reduce
        self.gather_act_order = build.ops.gather_act_order
        self.bias = self._own_bias(build, out_size) if bias else None
        # Without a bias, multiplying the input equals multiplying the outputs, which costs nothing there.
        self.in_multiplier = in_multiplier if bias else 1.0
        self.multiply, self.factor = build.ops.multiply, None
        if self.in_multiplier != 1.0:
            self.factor = build.constant([in_multiplier], "float32").reshape(1, 1)
        self.scale = build.scale(multiplier, out_size, 1.0 if bias else in_multiplier)

    def _own_bias(self, build: ModelBuilder, size: int) -> Array:
        of_weight = self.rows["weight"]
        names = tuple(name.removesuffix("weight") + "bias" for name in of_weight.names)
        return self.declare(
            build,
            "bias",
            size,
            role="bias",
            names=names,
            sizes=of_weight.sizes,
            segments=of_weight.segments,
            neighbours=of_weight.neighbours,
        )

    def forward(self, x: Array, residual: Array | None = None, activation: str | None = None) -> Array:
        """Return [tokens, in] -> [tokens, out], or half as many outputs with a gated activation.

        `residual` is added last, and gives the result its dtype.
        """
        if self.factor is not None:
            x = self.multiply(x, self.factor)
        out_dtype = residual.dtype if residual is not None and residual.dtype != x.dtype else None
        if not self.is_summed:
            return self.op(x, self.weight, self.bias, residual, activation, self.scale, out_dtype, *self.quantization)
        bias, residual = (self.bias, residual) if self.leads else (None, None)
        quantization = self.quantization
        if self.order is not None:
            # Its groups have inputs of every rank, so they are gathered from all ranks in the groups' order.
            x, quantization = self.gather_act_order(x, self.order), quantization[:-1]
        part = self.op(x, self.weight, bias, residual, activation, self.scale, out_dtype, *quantization)
        return self.all_reduce(part)


class PackedLinear(Linear):
    """Linears of one input, stored as one matrix; each part keeps its own name in the checkpoint.

    An instance called `attn.qkv` with parts `q_proj`, `k_proj` stores the tensors `attn.q_proj.weight` and so on.
    """

    is_in_checkpoint = False

    def __init__(
        self,
        build: ModelBuilder,
        in_size: int,
        parts: Sequence[tuple[str, int]],
        bias: bool = False,
        multiplier: Multiplier = 1.0,
        in_multiplier: float = 1.0,
        **facts: Any,
    ) -> None:
        facts |= {"names": tuple(f"{name}.weight" for name, _ in parts), "sizes": tuple(size for _, size in parts)}
        super().__init__(build, in_size, sum(facts["sizes"]), bias, multiplier, in_multiplier, **facts)

    def part(self, x: Array, begin: int, end: int) -> Array:
        """Return only the outputs `begin` to `end`, [tokens, in] -> [tokens, end - begin]."""
        assert self.in_multiplier == 1.0, "a part takes its input as it is"
        bias, scale = (None if each is None else each[begin:end] for each in (self.bias, self.scale))
        if self.blocks is not None:
            first, last = (num_bytes(slice_rows(self.blocks, 0, rows), x.shape[1]) for rows in (begin, end))
            some = slice_rows(self.blocks, begin, end)
            return self.op(
                x, self.weight.reshape(-1)[first:last], bias, None, None, scale, None, None, None, some, self.order
            )
        quantization = () if self.weight_scale is None else (self.weight_scale[begin:end], *self.quantization[1:])
        return self.op(x, self.weight[begin:end], bias, None, None, scale, None, *quantization)


class Embedding(QuantizableMatrix):
    """Token embedding times `multiplier`, sharded by rows.

    If it `is_tied`, its weight is the LM head's, and may be quantised. It may be in blocks anyway. If it `is_wide`, its
    vectors are in float32.
    """

    def __init__(
        self,
        build: ModelBuilder,
        vocab_size: int,
        hidden_size: int,
        multiplier: float = 1.0,
        is_tied: bool = False,
        is_wide: bool = False,
    ) -> None:
        facts = {"can_be_quantised": is_tied, "is_lm_head": is_tied}
        self.part = vocabulary_part(vocab_size, build.rank)
        super().__init__(build, self.part.rows, hidden_size, role="embedding", **facts)
        self.op, self.of_ranks = build.ops.embedding, build.ops.sharded_embedding
        self.is_shared = build.rank.of > 1
        self.multiplier = multiplier
        self.is_wide = is_wide
        self.dtype = build.float32 if is_wide else build.dtype
        """Dtype of the embedding's vectors."""

    def forward(self, token_ids: Array) -> Array:
        """Return the vectors of token ids, [tokens] -> [tokens, hidden]."""
        how: tuple[Any, ...] = ()
        if self.quantization:
            scale, group_size, blocks = self.quantization
            how = (scale, group_size, self.dtype, blocks)
        elif self.is_wide:
            how = (None, None, self.dtype)
        if self.is_shared:
            return self.of_ranks(token_ids, self.weight, self.multiplier, self.part.first, self.part.own, *how)
        return self.op(token_ids, self.weight, self.multiplier, *how)
