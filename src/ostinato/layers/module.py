"""What layers and models are made of: modules that own weights and other modules. No torch, so that a model can be
sketched: built without memory, to read its weight table and its calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ostinato.plan.cuts import Rank
from ostinato.plan.weights import Role, Weight

if TYPE_CHECKING:
    import torch

    from ostinato.ops.kernels import Ops

Multiplier = float | tuple[tuple[float, int], ...]
"""One number for all outputs, or (number, for how many outputs), one behind the other."""


class Builder(Protocol):
    """What modules are built with: a `Build`, which gives them memory, or a `Sketch`, which gives shapes alone."""

    @property
    def ops(self) -> Ops:
        """The kernels to call."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The model's."""
        ...

    @property
    def float32(self) -> torch.dtype: ...

    @property
    def rank(self) -> Rank:
        """Whose part of the model it is."""
        ...

    def weight(self, row: Weight) -> torch.Tensor:
        """An unwritten weight; loading fills it."""
        ...

    def scale(self, multiplier: Multiplier, size: int, factor: float) -> torch.Tensor | None:
        """What `ops.linear` takes to multiply `size` outputs: [size] float32, or None where that is 1 throughout."""
        ...

    def rounded(self, value: float) -> float:
        """As it is in the model's dtype."""
        ...

    def constant(self, values: Sequence[float], dtype: str | torch.dtype) -> torch.Tensor: ...

    def stack(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """[tokens, ...] each -> [tokens, tensors, ...]"""
        ...


class Module:
    """Owns what its attributes hold: weights that it declares with `own`, and other modules.

    The checkpoint calls them as the attributes are called, but for those that `names` calls otherwise. Where
    `is_in_checkpoint` is false, the module's weights stand in the checkpoint beside it, not under its name.
    What it `borrowed` are modules, by their names in it, that it calls and another module owns.
    """

    is_in_checkpoint = True

    def __init__(self) -> None:
        self.rows: dict[str, Weight] = {}
        """By the attribute that holds the weight."""
        self.names: dict[str, str] = {}
        self.borrowed: Mapping[str, Module] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)  # type: ignore[attr-defined]

    def own(self, build: Builder, attribute: str, *shape: int, role: Role, **facts: Any) -> torch.Tensor:
        """Declares the weight that `attribute` is to hold; `facts` are further fields of its row."""
        row = Weight(shape, role, **({"names": (attribute,)} | facts))
        self.rows[attribute] = row
        return build.weight(row)

    def children(self) -> Iterator[tuple[str, Module]]:
        """(name, module) of those that it owns, in the order in which they were made."""
        for attribute, value in vars(self).items():
            if isinstance(value, Module):
                yield self.names.get(attribute, attribute), value

    def named_modules(self, path: str = "") -> Iterator[tuple[str, Module]]:
        """It and all modules within, by their paths."""
        yield path, self
        for name, child in self.children():
            yield from child.named_modules(joined(path, name))

    def name_of(self, module: Module) -> str:
        """The path of a module within."""
        return next(path for path, found in self.named_modules() if found is module)

    def modules(self) -> Iterator[Module]:
        return (module for _, module in self.named_modules())

    def own_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(attribute, tensor) of the weights that are its own."""
        for attribute in self.rows:
            yield attribute, getattr(self, attribute)

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(path, tensor) of all weights."""
        for path, module in self.named_modules():
            for attribute, tensor in module.own_tensors():
                yield joined(path, attribute), tensor

    def parameters(self) -> Iterator[torch.Tensor]:
        return (tensor for _, tensor in self.named_parameters())

    def weights(self, prefix: str = "", without: Iterable[Module] = ()) -> Iterator[tuple[Module, str, Weight]]:
        """(module, attribute, row) of all weights, their names as in a checkpoint that calls this module `prefix`;
        not those of the modules `without`."""
        for attribute, row in self.rows.items():
            yield self, attribute, row.under(f"{prefix}." if prefix else "")
        for name, child in self.children():
            if child not in without:
                yield from child.weights(joined(prefix, name) if child.is_in_checkpoint else prefix, without)


M = TypeVar("M", bound=Module)


class ModuleList(Module, Sequence[M]):
    """Modules by their numbers."""

    def __init__(self, modules: Iterable[M]) -> None:
        super().__init__()
        self._modules = list(modules)

    def children(self) -> Iterator[tuple[str, Module]]:
        return ((str(i), module) for i, module in enumerate(self._modules))

    def __len__(self) -> int:
        return len(self._modules)

    def __getitem__(self, index: Any) -> Any:
        return self._modules[index]


def joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
