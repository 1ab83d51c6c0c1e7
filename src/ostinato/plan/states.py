"""What a state layer is to the plan: the arrays that its mixer keeps in slots, and the operations that work on them.

The plan, pools, checkpoints, speculation and messages know a mixer by `Mixer` alone: arrays, bytes, operations, sizes.
The kinds stand in `mixers.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal, Protocol

from ostinato.ops.facts import in_prompts

StateDtype = Literal["model", "state"]
"""The model's dtype, or the setting `ssm_state_dtype`: float32 where nobody wants another."""


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
    """A layer's part of a slot. Names: `conv` [width - 1, channels], the last inputs of a convolution; `ssm`, the state
    of a recurrence; `delta` [heads, key_dim, value_dim], that of a delta net; `hidden` [1, hidden], a model's last
    hidden state."""

    arrays: tuple[StateArray, ...] = ()

    def num_bytes(self, widths: Mapping[StateDtype, int]) -> int:
        """Of one slot; `widths` are bytes of an element."""
        return sum(array.num_elements * widths[array.dtype] for array in self.arrays)

    @property
    def recurrent_elements(self) -> int:
        """Of the arrays with a dtype of their own, which a recurrence computes in float32."""
        return sum(array.num_elements for array in self.arrays if array.dtype == "state")

    def __getitem__(self, name: str) -> StateArray:
        return next(array for array in self.arrays if array.name == name)


NO_STATE = StateSpec()


class Mixer(Protocol):
    """What keeps a state in one layer. Each kind is a frozen dataclass of its sizes."""

    @property
    def kind(self) -> str:
        """What messages call it."""
        ...

    @property
    def state(self) -> StateSpec: ...

    @property
    def operations(self) -> Mapping[str, str | None]:
        """Those of a decode step whose sizes are this mixer's, and the array of the state that each reads and writes,
        if it does. A row of `ops.facts` says what takes an operation's place in prompts."""
        ...

    @property
    def sizes(self) -> Mapping[str, int]:
        """By the names under which the rules of these operations (work, scratch memory, launches) ask for them."""
        ...

    @property
    def chunk_size(self) -> int | None:
        """Tokens that a scan takes together, at whose multiples it has the state anyway; None: at any token."""
        ...

    @property
    def scan_writes_states(self) -> bool:
        """Whether the scan of a prompt can write out states that it passes on its way."""
        ...

    @property
    def rounds_stochastically(self) -> bool:
        """Whether its operations do as `ssm_state_rounding` stochastic says."""
        ...

    @property
    def needs_float32(self) -> bool:
        """Whether its arrays of the dtype "state" lose too much in 16 bits, so that its operations take none."""
        ...

    @property
    def scan_flops(self) -> int:
        """Floating-point operations of a prompt's token, beside those of its weights."""
        ...

    @property
    def conv_parameters(self) -> int:
        """Of the convolution's taps, which no product reads."""
        ...

    def problem(self) -> str | None:
        """What no such mixer can be, as the end of "config.json has"; None if there is nothing."""
        ...


def operations_of(mixer: Mixer | None) -> tuple[str, ...]:
    """All operations whose sizes are the mixer's: of a decode step, and what takes their place in prompts."""
    own = () if mixer is None else tuple(mixer.operations)
    return tuple(dict.fromkeys((*own, *map(in_prompts, own))))
