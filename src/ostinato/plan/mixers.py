"""State layers in the plan: the arrays that a mixer keeps in slots, and the operations on them.

Each kind of state layer is a `Mixer`, a frozen dataclass of its sizes. The plan, pools, checkpoints, speculation and
messages know a mixer by `Mixer` alone: arrays, bytes, operations, sizes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import ClassVar, Literal

from ostinato.ops.kernel_cost import chunked_scan_flops, delta_flops, selective_flops
from ostinato.ops.operations import prefill_op
from ostinato.ops.sizes import DTYPE_BYTES, INT8_STATE_BLOCK, TOKEN_DIGITS

StateDtype = Literal["model", "state"]
"""The model's dtype, or that of the setting `ssm_state_dtype`, which is float32 by default."""


@dataclass(frozen=True)
class StateArray:
    """One array of a layer's part of a slot. All slots of it are one tensor, [slots, *shape]."""

    name: str
    shape: tuple[int, ...]
    dtype: StateDtype

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class StateSpec:
    """A layer's part of a slot.

    Names: `conv` [width - 1, channels], the last inputs of a convolution; `ssm`, the state of a recurrence; `delta`
    [heads, key_dim, value_dim], that of a delta net; `hidden` [1, hidden], a model's last hidden state. N-gram
    embeddings have `tokens` [n - 1, digits], the last token ids, and `ngram_conv`, their convolution's last inputs.
    """

    arrays: tuple[StateArray, ...] = ()

    def num_bytes(self, widths: Mapping[StateDtype, int]) -> int:
        """Return the bytes in one slot; `widths` are bytes of an element."""
        return sum(array.num_elements * widths[array.dtype] for array in self.arrays)

    def packed_bytes(self, widths: Mapping[StateDtype, int]) -> int:
        """Return the bytes of a packed checkpoint: arrays in the dtype `state` have 8 bits, and scales in float32."""
        return sum(
            array.num_elements
            + prod(array.shape[:-1]) * -(-array.shape[-1] // INT8_STATE_BLOCK) * DTYPE_BYTES["float32"]
            if array.dtype == "state"
            else array.num_elements * widths[array.dtype]
            for array in self.arrays
        )

    @property
    def recurrent_elements(self) -> int:
        """Elements of the arrays in the dtype `state`, which a recurrence computes in float32."""
        return sum(array.num_elements for array in self.arrays if array.dtype == "state")

    def __getitem__(self, name: str) -> StateArray:
        return next(array for array in self.arrays if array.name == name)


NO_STATE = StateSpec()


class Mixer(ABC):
    """Keeper of a state in one layer. Each kind is a frozen dataclass of its sizes."""

    kind: ClassVar[str]
    """Name in messages."""
    operations: ClassVar[Mapping[str, str | None]]
    """Operations of a decode step with this mixer's sizes -> the state array that each reads and writes, or None.

    A row of `ops.operations` says which operation replaces it in prompts.
    """
    rounds_stochastically: ClassVar[bool] = False
    """True if its operations support `ssm_state_rounding` stochastic."""
    needs_float32: ClassVar[bool] = False
    """True if its arrays of the dtype "state" lose too much in 16 bits, so that its operations do not take them."""
    chunk_size: int | None = None
    """Tokens that a scan takes together: it has the state at their multiples anyway. None: at any token."""
    scan_writes_states: bool = True
    """True if the scan of a prompt can write out intermediate states."""

    @property
    @abstractmethod
    def state(self) -> StateSpec:
        """Arrays in a slot."""

    @property
    @abstractmethod
    def sizes(self) -> Mapping[str, int]:
        """Sizes under the names that the rules of its operations (work, scratch memory, launches) use."""

    @property
    def scan_flops(self) -> int:
        """Floating-point operations per token of a prompt, without those of its weights."""
        return 0

    @property
    def conv_parameters(self) -> int:
        """Number of the convolution's taps, which no matmul reads."""
        return self.sizes["channels"] * self.sizes["width"]

    @abstractmethod
    def problem(self) -> str | None:
        """Return what is impossible for such a mixer, as the end of "config.json has", or None."""


def operations_of(mixer: Mixer | None) -> tuple[str, ...]:
    """Return all operations with the mixer's sizes: those of a decode step, and their replacements in prompts."""
    names = () if mixer is None else tuple(mixer.operations)
    return tuple(dict.fromkeys((*names, *map(prefill_op, names))))


@dataclass(frozen=True)
class Mamba2Spec(Mixer):
    """Mamba-2 mixer of one layer; its conv and SSM state are stored in slots."""

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_kernel: int
    chunk_size: int = field()  # Without this, its default would be that of all mixers.
    scan_writes_states: bool = True
    norm_spans_ranks: bool = False
    """True if the norm's single group is sharded among ranks, each with some of its channels."""

    kind = "Mamba-2"
    operations: ClassVar[Mapping[str, str | None]] = {
        "causal_conv1d": "conv",
        "state_update": "ssm",
        "gated_rms_norm": None,
    }
    rounds_stochastically = True

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
    def state(self) -> StateSpec:
        conv = StateArray("conv", (self.conv_kernel - 1, self.conv_dim), "model")
        return StateSpec((conv, StateArray("ssm", (self.num_heads, self.head_dim, self.state_size), "state")))

    @property
    def ssm_state_elements(self) -> int:
        return self.state["ssm"].num_elements

    @property
    def sizes(self) -> Mapping[str, int]:
        return {
            "num_heads": self.num_heads,
            "head_dim": self.head_dim,
            "state_size": self.state_size,
            "state_elements": self.ssm_state_elements,
            "num_groups": self.num_groups,
            "chunk_size": self.chunk_size,
            "channels": self.conv_dim,
            "width": self.conv_kernel,
            # Size of the norm.
            "size": self.intermediate_size // self.num_groups,
        }

    @property
    def scan_flops(self) -> int:
        return chunked_scan_flops(
            state_elements=self.ssm_state_elements,
            state_size=self.state_size,
            groups=self.num_groups,
            channels=self.intermediate_size,
            chunk_size=self.chunk_size,
        )

    def problem(self) -> str | None:
        if min(self.num_heads, self.num_groups, self.state_size, self.conv_kernel, self.chunk_size) < 1:
            return "a state layer without heads, groups, states, convolution or chunks"
        if self.num_heads % self.num_groups:
            return f"{self.num_heads} state heads, which {self.num_groups} groups cannot share"
        return None


@dataclass(frozen=True)
class Mamba1Spec(Mixer):
    """Mamba-1 mixer of one layer: each channel has a separate state."""

    channels: int
    state_size: int
    conv_kernel: int
    time_step_rank: int
    """Inputs of the projection to time steps."""
    scan_writes_states: bool = True

    kind = "Mamba-1"
    operations: ClassVar[Mapping[str, str | None]] = {
        "causal_conv1d": "conv",
        "selective_update": "ssm",
        "gated_rms_norm": None,
    }
    rounds_stochastically = True

    @property
    def state(self) -> StateSpec:
        conv = StateArray("conv", (self.conv_kernel - 1, self.channels), "model")
        return StateSpec((conv, StateArray("ssm", (self.channels, self.state_size), "state")))

    @property
    def sizes(self) -> Mapping[str, int]:
        return {
            "channels": self.channels,
            "state_size": self.state_size,
            "state_elements": self.state["ssm"].num_elements,
            "width": self.conv_kernel,
            # Size of the gate, which replaces a norm here.
            "size": self.channels,
        }

    @property
    def scan_flops(self) -> int:
        return selective_flops(state_elements=self.state["ssm"].num_elements)

    def problem(self) -> str | None:
        if min(self.channels, self.state_size, self.conv_kernel, self.time_step_rank) < 1:
            return "a state layer without channels, states, convolution or a rank of its time steps"
        return None


StoredDeltaNet = Literal["apart", "by_key_head", "beta_by_key_head", "one_by_one"]
"""Layout of a delta net's weights in a checkpoint, as `layers/delta_net.py` describes."""


@dataclass(frozen=True)
class GatedDeltaSpec(Mixer):
    """Gated delta net of one layer: each head has a matrix from keys to values.

    Adjacent heads share a key head; with `interleaved_key_heads`, head i has key head i % `num_key_heads`. A head has
    one decay, or with `per_channel` one per channel of its keys (Kimi's).
    """

    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    interleaved_key_heads: bool = False
    per_channel: bool = False

    kind = "delta net"
    operations: ClassVar[Mapping[str, str | None]] = {
        "causal_conv1d": "conv",
        "delta_update": "delta",
        "gated_rms_norm": None,
    }
    needs_float32 = True

    @property
    def key_size(self) -> int:
        """Size of the keys of all heads, and of the queries."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: queries, keys and values side by side."""
        return 2 * self.key_size + self.value_size

    @property
    def state(self) -> StateSpec:
        conv = StateArray("conv", (self.conv_kernel - 1, self.conv_dim), "model")
        return StateSpec((conv, StateArray("delta", (self.num_heads, self.key_dim, self.value_dim), "state")))

    @property
    def sizes(self) -> Mapping[str, int]:
        return {
            "num_heads": self.num_heads,
            "key_dim": self.key_dim,
            "value_dim": self.value_dim,
            "per_channel": self.per_channel,
            "state_elements": self.state["delta"].num_elements,
            "channels": self.conv_dim,
            "width": self.conv_kernel,
            # Size of the norm.
            "size": self.value_dim,
        }

    @property
    def scan_flops(self) -> int:
        return delta_flops(state_elements=self.state["delta"].num_elements)

    def problem(self) -> str | None:
        if min(self.num_heads, self.num_key_heads, self.key_dim, self.value_dim, self.conv_kernel) < 1:
            return "a delta net without heads, channels or convolution"
        if self.num_heads % self.num_key_heads:
            return f"{self.num_heads} heads of a delta net, which {self.num_key_heads} key heads cannot serve"
        return None


@dataclass(frozen=True)
class NgramSpec:
    """N-gram embedding before a layer's mixer: hashed n-grams, n from 2 on, each with heads of a table.

    It is added to every one of `streams` residual streams of `hidden_size`, with a convolution of its own.
    """

    multipliers: tuple[int, ...]
    """Multipliers of a token and of those before it in the hash, as many as the largest n."""
    sizes: tuple[int, ...]
    """Rows of each head's part of the table, those of n = 2 first."""
    table_rows: int
    """Rows of the whole table, padded."""
    parts: int
    """Number of tensors in which a checkpoint has the table."""
    embed_dim: int
    """Elements of all heads together."""
    end_id: int
    """Token that ends a text, and stands for those before its beginning."""
    streams: int
    hidden_size: int
    width: int
    """Taps of the convolution, which are `len(multipliers)` tokens apart."""

    @property
    def starts(self) -> tuple[int, ...]:
        """First row of each head's part of the table."""
        return tuple(sum(self.sizes[:head]) for head in range(len(self.sizes)))

    @property
    def channels(self) -> int:
        return self.streams * self.hidden_size

    @property
    def head_dim(self) -> int:
        return self.embed_dim // len(self.sizes)

    @property
    def dilation(self) -> int:
        return len(self.multipliers)


@dataclass(frozen=True)
class NgramDeltaSpec(GatedDeltaSpec):
    """Gated delta net of a layer that begins with an n-gram embedding, whose tokens and inputs are in slots too."""

    ngrams: NgramSpec = field(kw_only=True)

    kind = "delta net with n-grams"
    operations: ClassVar[Mapping[str, str | None]] = {
        "ngram_ids": "tokens",
        "dilated_conv1d": "ngram_conv",
        **GatedDeltaSpec.operations,
    }

    @property
    def state(self) -> StateSpec:
        kept = len(self.ngrams.multipliers) - 1
        tokens = StateArray("tokens", (kept, TOKEN_DIGITS), "model")
        gap = (self.ngrams.width - 1) * self.ngrams.dilation
        return StateSpec(
            (*super().state.arrays, tokens, StateArray("ngram_conv", (gap, self.ngrams.channels), "model"))
        )

    @property
    def sizes(self) -> Mapping[str, int]:
        return {
            **super().sizes,
            "token_elements": self.state["tokens"].num_elements,
            "ngram_heads": len(self.ngrams.sizes),
            "stream_channels": self.ngrams.channels,
            "stream_width": self.ngrams.width,
            "dilation": self.ngrams.dilation,
        }

    @property
    def conv_parameters(self) -> int:
        return super().conv_parameters + self.ngrams.channels * self.ngrams.width


@dataclass(frozen=True)
class ShortConvSpec(Mixer):
    """Short convolution between two gates: its last inputs are the whole state."""

    channels: int
    width: int

    kind = "short convolution"
    operations: ClassVar[Mapping[str, str | None]] = {"causal_conv1d": "conv"}

    @property
    def state(self) -> StateSpec:
        return StateSpec((StateArray("conv", (self.width - 1, self.channels), "model"),))

    @property
    def sizes(self) -> Mapping[str, int]:
        return {"channels": self.channels, "width": self.width}

    def problem(self) -> str | None:
        return None if self.width > 1 else f"a convolution of {self.width} taps; it should have 2 or more"
