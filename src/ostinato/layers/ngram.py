"""N-gram embedding (Qwen4): rows of a table on disk, by hashes of a token and those before it, added to all streams.

The streams are those of `layers/hyper_connection.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ostinato.layers.hyper_connection import StreamNorm
from ostinato.layers.linear import Linear
from ostinato.layers.module import ModelBuilder, Module, ModuleList
from ostinato.plan.mixers import NgramSpec

if TYPE_CHECKING:
    from ostinato.ops.step_inputs import Array, LayerCache, StepInputs


class TablePart(Module):
    """A tensor of a table, which stays where the file is mapped."""

    def __init__(self, build: ModelBuilder, rows: int, size: int) -> None:
        super().__init__()
        self.weight = self.declare(build, "weight", rows, size, role="table")


class NgramTable(ModuleList[TablePart]):
    """Table of embeddings, in `parts` tensors of equally many rows; the last may have fewer."""

    def __init__(self, build: ModelBuilder, spec: NgramSpec) -> None:
        self.rows_of_part = -(-spec.table_rows // spec.parts)
        begins = range(0, spec.table_rows, self.rows_of_part)
        sizes = [min(self.rows_of_part, spec.table_rows - begin) for begin in begins]
        super().__init__(TablePart(build, rows, spec.head_dim) for rows in sizes)

    def children(self) -> Any:
        return ((f"shard_{number}", part) for number, part in super().children())


class NgramEmbedding(Module):
    """Embeddings of the n-grams that end with each token."""

    def __init__(self, build: ModelBuilder, spec: NgramSpec) -> None:
        super().__init__()
        self.ops, self.spec, self.dtype = build.ops, spec, build.dtype
        self.ngram_embedding = NgramTable(build, spec)
        self.multipliers, self.sizes, self.starts = (
            build.constant(values, "int64") for values in (spec.multipliers, spec.sizes, spec.starts)
        )

    def forward(self, token_ids: Array, inputs: StepInputs, memory: LayerCache) -> Array:
        """Return the embeddings of each token's n-grams, [tokens] -> [tokens, embed_dim]."""
        ids = self.ops.ngram_ids(
            token_ids,
            self.multipliers,
            self.sizes,
            self.starts,
            self.spec.end_id,
            memory.states["tokens"],
            inputs.row_starts,
            inputs.read_slots,
            inputs.write_slots,
            inputs.num_decode_rows,
            inputs.checkpoints,
        )
        return self.ops.ngram_embedding(ids, [part.weight for part in self.ngram_embedding], self.dtype)


class DilatedConv(Module):
    """Depthwise convolution along each row, with gaps between its taps."""

    def __init__(self, build: ModelBuilder, spec: NgramSpec) -> None:
        super().__init__()
        self.op, self.dilation = build.ops.dilated_conv1d, spec.dilation
        stored: dict[str, Any] = {"stored_shape": (spec.channels, 1, spec.width), "stored_transposed": True}
        self.weight = self.declare(build, "weight", spec.width, spec.channels, role="convolution", **stored)

    def forward(self, x: Array, inputs: StepInputs, memory: LayerCache) -> Array:
        """Convolve along each row, [tokens, channels] -> [tokens, channels]."""
        return self.op(
            x,
            self.weight,
            self.dilation,
            memory.states["ngram_conv"],
            inputs.row_starts,
            inputs.read_slots,
            inputs.write_slots,
            inputs.num_decode_rows,
            inputs.checkpoints,
        )


class NgramLayer(Module):
    """Gated values of a token's n-grams, and their convolution, added to the streams.

    Values are those of all streams; keys and the gates that they give with the normed streams are of each.
    """

    def __init__(self, build: ModelBuilder, spec: NgramSpec, eps: float) -> None:
        super().__init__()
        self.ops = build.ops
        self.ple_embedding = NgramEmbedding(build, spec)
        self.key_proj = Linear(build, spec.embed_dim, spec.channels)
        self.value_proj = Linear(build, spec.embed_dim, spec.hidden_size)
        self.norm_key, self.norm_query, self.norm_conv = (
            StreamNorm(build, spec.hidden_size, spec.streams, eps) for _ in range(3)
        )
        self.conv1d = DilatedConv(build, spec)

    def forward(self, x: Array, inputs: StepInputs, memory: LayerCache) -> Array:
        """Add to the streams, [tokens, streams * hidden] -> [tokens, streams * hidden]."""
        split = self.ops.hook.split
        embedded = split("state", self.ple_embedding, (inputs.token_ids,), inputs, memory)
        keys, values = self.norm_key(self.key_proj(embedded)), self.value_proj(embedded)
        gated = self.ops.ngram_gate(keys, self.norm_query(x), values)
        convolved = split("state", self.conv1d, (self.norm_conv(gated),), inputs, memory)
        return self.ops.add(x, self.ops.add(gated, convolved))
