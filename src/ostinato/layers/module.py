"""Bases of layers and models: modules that own weights and other modules, and matrices that may be quantised.

No torch, so that a model can be sketched: built without memory, to read its weight table and its calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ostinato.ops.quant.block_formats import Blocks
from ostinato.ops.step_inputs import Array
from ostinato.plan.tensor_parallel import Rank
from ostinato.plan.weights import Role, Weight

if TYPE_CHECKING:
    from ostinato.ops.arrays import Arrays
    from ostinato.ops.dispatch import Ops

Multiplier = float | tuple[tuple[float, int], ...]
"""One number for all outputs, or (number, count of outputs) for consecutive outputs."""


class ModelBuilder(Protocol):
    """Builder of modules: a `WeightAllocator`, which gives them memory, or a `Sketch`, which gives only shapes."""

    @property
    def ops(self) -> Ops:
        """Kernels to call."""

    @property
    def dtype(self) -> Any:
        """Dtype of the model."""

    @property
    def float32(self) -> Any: ...

    @property
    def rank(self) -> Rank:
        """Rank that gets this part of the model."""

    def weight(self, row: Weight) -> Array:
        """Allocate an unwritten weight; loading fills it."""

    def scale(self, multiplier: Multiplier, size: int, factor: float) -> Array | None:
        """Return `ops.linear`'s multipliers of `size` outputs, [size] float32, or None if they are 1 throughout."""

    def rounded(self, value: float) -> float:
        """Return `value` rounded to the model's dtype."""

    def constant(self, values: Sequence[float], dtype: object) -> Array: ...

    def repeat(self, x: Array, count: int) -> Array:
        """Repeat each head `count` times, [tokens, heads, size] -> [tokens, heads * count, size]."""

    @property
    def arrays(self) -> Arrays:
        """Maker of the model's arrays."""


class Module:
    """Base class of layers and models: owns weights declared with `declare`, and submodules.

    A checkpoint uses the names of the attributes, except those that `names` replaces. If `is_in_checkpoint` is false,
    the module's weights are in the checkpoint under its parent's name, not under its own. `borrowed` are modules, by
    their names in this one, that it calls and another module owns.
    """

    is_in_checkpoint = True

    def __init__(self) -> None:
        self.rows: dict[str, Weight] = {}
        """Rows of the weight table, by the attribute that holds the weight."""
        self.names: dict[str, str] = {}
        self.borrowed: Mapping[str, Module] = {}

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self.forward(*args, **kwargs)  # type: ignore[attr-defined]

    def declare(self, build: ModelBuilder, attribute: str, *shape: int, role: Role, **facts: Any) -> Array:
        """Declare and allocate the weight of `attribute`; `facts` are further fields of its row."""
        row = Weight(shape, role, **({"names": (attribute,)} | facts))
        self.rows[attribute] = row
        return build.weight(row)

    def children(self) -> Iterator[tuple[str, Module]]:
        """Yield (name, module) of the owned submodules, in the order in which they were made."""
        for attribute, value in vars(self).items():
            if isinstance(value, Module):
                yield self.names.get(attribute, attribute), value

    def named_modules(self, path: str = "") -> Iterator[tuple[str, Module]]:
        """Yield this module and all modules within, with their paths."""
        yield path, self
        for name, child in self.children():
            yield from child.named_modules(join_path(path, name))

    def name_of(self, module: Module) -> str:
        """Return the name that the checkpoint has for a module within, or for its parent if it has none for it."""
        path = next(path for path, found in self.named_modules() if found is module)
        return path if module.is_in_checkpoint else path.rpartition(".")[0]

    def modules(self) -> Iterator[Module]:
        return (module for _, module in self.named_modules())

    def local_tensors(self) -> Iterator[tuple[str, Array]]:
        """Yield (attribute, tensor) of the module's own weights."""
        for attribute in self.rows:
            yield attribute, getattr(self, attribute)

    def named_parameters(self) -> Iterator[tuple[str, Array]]:
        """Yield (path, tensor) of all weights."""
        for path, module in self.named_modules():
            for attribute, tensor in module.local_tensors():
                yield join_path(path, attribute), tensor

    def parameters(self) -> Iterator[Array]:
        """Yield all weights in memory."""
        for module in self.modules():
            on_disk = {attribute for attribute, row in module.rows.items() if row.stays_on_disk}
            yield from (tensor for attribute, tensor in module.local_tensors() if attribute not in on_disk)

    def weights(self, prefix: str = "", without: Iterable[Module] = ()) -> Iterator[tuple[Module, str, Weight]]:
        """Yield (module, attribute, row) of all weights, except those of the modules `without`.

        Names are those of a checkpoint that calls this module `prefix`.
        """
        for attribute, row in self.rows.items():
            yield self, attribute, row.with_prefix(f"{prefix}." if prefix else "")
        for name, child in self.children():
            if child not in without:
                yield from child.weights(join_path(prefix, name) if child.is_in_checkpoint else prefix, without)


class QuantizableMatrix(Module):
    """Module with one weight, or a stack of them, that may be quantised: as integers of 8 bits, or as `blocks`.

    `order` int32 [in] maps each element of a row in blocks to its input; None means element i belongs to input i. If
    the inputs are sharded, these are the inputs of all ranks.

    `weight_scale` and `group_size` are those of integers; `group_size` is None if a whole row has one scale. With
    `int8_activations`, which needs that, the inputs are quantised too. `blocks`
    are the formats of the rows of a weight in blocks, or of each weight in a stack. Such a weight is uint8 [out, bytes
    of a row], or [bytes] if rows have different formats.
    """

    def __init__(self, build: ModelBuilder, *shape: int, role: Role, **facts: Any) -> None:
        super().__init__()
        self.weight_scale: Array | None = None
        self.group_size: int | None = None
        self.blocks: Blocks | None = None
        self.order: Array | None = None
        self.int8_activations = False
        self.weight = self.declare(build, "weight", *shape, role=role, **facts)

    def local_tensors(self) -> Iterator[tuple[str, Array]]:
        yield from super().local_tensors()
        if self.weight_scale is not None:
            yield "weight_scale", self.weight_scale
        if self.order is not None:
            yield "order", self.order

    @property
    def quantization(self) -> tuple[Any, ...]:
        """Last arguments of a matmul: scales, their group size, blocks, order of the inputs, and `int8_activations`.

        The last ones are left out if they are the defaults. The tuple is empty if the weight is not quantised.
        """
        if self.weight_scale is None and self.blocks is None:
            return ()
        of_weight = self.weight_scale, self.group_size, self.blocks
        if self.int8_activations:
            return (*of_weight, None, True)
        return of_weight if self.order is None else (*of_weight, self.order)


M = TypeVar("M", bound=Module)


class ModuleList(Module, Sequence[M]):
    """List of modules, named by their numbers from `first` on."""

    def __init__(self, modules: Iterable[M], first: int = 0) -> None:
        super().__init__()
        self._modules, self._first = list(modules), first

    def children(self) -> Iterator[tuple[str, Module]]:
        return ((str(i), module) for i, module in enumerate(self._modules, self._first))

    def __len__(self) -> int:
        return len(self._modules)

    def __getitem__(self, index: Any) -> Any:
        return self._modules[index]


def split_columns(x: Array, sizes: Sequence[int]) -> Iterator[Array]:
    """Yield consecutive parts of the columns of `x` [tokens, columns], with `sizes` columns each."""
    begin = 0
    for size in sizes:
        yield x[:, begin : begin + size]
        begin += size


def join_path(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name
