"""State layers in the plan: the arrays that a mixer keeps in slots, and the operations on them.

The plan, pools, checkpoints, speculation and messages know a mixer by `Mixer` alone: arrays, bytes, operations, sizes.
The kinds are in `mixers.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal, Protocol

from ostinato.ops.facts import prefill_op

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
    [heads, key_dim, value_dim], that of a delta net; `hidden` [1, hidden], a model's last hidden state.
    """

    arrays: tuple[StateArray, ...] = ()

    def num_bytes(self, widths: Mapping[StateDtype, int]) -> int:
        """Return the bytes in one slot; `widths` are bytes of an element."""
        return sum(array.num_elements * widths[array.dtype] for array in self.arrays)

    @property
    def recurrent_elements(self) -> int:
        """Elements of the arrays in the dtype `state`, which a recurrence computes in float32."""
        return sum(array.num_elements for array in self.arrays if array.dtype == "state")

    def __getitem__(self, name: str) -> StateArray:
        return next(array for array in self.arrays if array.name == name)


NO_STATE = StateSpec()


class Mixer(Protocol):
    """Interface of what keeps a state in one layer. Each kind is a frozen dataclass of its sizes."""

    @property
    def kind(self) -> str:
        """Name in messages."""
        ...

    @property
    def state(self) -> StateSpec: ...

    @property
    def operations(self) -> Mapping[str, str | None]:
        """Operations of a decode step with this mixer's sizes -> the state array that each reads and writes, or None.

        A row of `ops.facts` says which operation replaces it in prompts.
        """
        ...

    @property
    def sizes(self) -> Mapping[str, int]:
        """Sizes under the names that the rules of these operations (work, scratch memory, launches) use."""
        ...

    @property
    def chunk_size(self) -> int | None:
        """Tokens that a scan takes together: it has the state at their multiples anyway. None: at any token."""
        ...

    @property
    def scan_writes_states(self) -> bool:
        """True if the scan of a prompt can write out intermediate states."""
        ...

    @property
    def rounds_stochastically(self) -> bool:
        """True if its operations support `ssm_state_rounding` stochastic."""
        ...

    @property
    def needs_float32(self) -> bool:
        """True if its arrays of the dtype "state" lose too much in 16 bits, so that its operations do not take them."""
        ...

    @property
    def scan_flops(self) -> int:
        """Floating-point operations per token of a prompt, without those of its weights."""
        ...

    @property
    def conv_parameters(self) -> int:
        """Number of the convolution's taps, which no matmul reads."""
        ...

    def problem(self) -> str | None:
        """Return what is impossible for such a mixer, as the end of "config.json has", or None."""
        ...


def operations_of(mixer: Mixer | None) -> tuple[str, ...]:
    """Return all operations with the mixer's sizes: those of a decode step, and their replacements in prompts."""
    own = () if mixer is None else tuple(mixer.operations)
    return tuple(dict.fromkeys((*own, *map(prefill_op, own))))
