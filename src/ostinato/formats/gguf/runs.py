"""Which tensors of a GGUF file can be read where they lie. Imports no torch.

A product may need several tensors as one matrix, such as gates and what they gate. They are one where they lie one
directly behind the other, as most writers put these two. Tensors whose rows a checkpoint has in another order, such as
queries and keys of Llama, are copied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostinato.formats.gguf.header import Header, TensorPlace
from ostinato.formats.gguf.names import EACH, GATE, UP, checkpoint_name, pairs_neighbours
from ostinato.ops.blocks.formats import BLOCK_FORMATS

if TYPE_CHECKING:
    from ostinato.plan.model import ModelSpec


def stored_runs(header: Header, model: ModelSpec) -> tuple[tuple[str, ...], ...]:
    """The matrices in blocks, as the checkpoint names them, in runs of those that lie one directly behind the other.
    Experts are not among them."""
    runs: list[list[str]] = []
    before: TensorPlace | None = None
    gate: TensorPlace | None = None
    for tensor in sorted(header.tensors.values(), key=lambda tensor: (tensor.file, tensor.begin)):
        name = _name(tensor, model)
        if name is None:
            before = gate = None
            continue
        follows = before is not None and (before.file, _end(before)) == (tensor.file, tensor.begin)
        if name.endswith(GATE):
            # The run goes on behind it, if its other half comes next.
            if not follows or gate is not None:
                runs.append([])
            before = gate = tensor
            continue
        if name.endswith(UP):
            if gate is None or not follows or gate.type != tensor.type:
                before = gate = None
                continue
            name = name.removesuffix(UP)
        elif not follows or gate is not None:
            runs.append([])
        runs[-1].append(name)
        before, gate = tensor, None
    return tuple(tuple(run) for run in runs if run)


def _name(tensor: TensorPlace, model: ModelSpec) -> str | None:
    """None for what is not read where it lies."""
    is_other_order = pairs_neighbours(model.architecture, tensor.name)
    if tensor.type.name not in BLOCK_FORMATS or len(tensor.shape) != 2 or is_other_order:
        return None
    name = checkpoint_name(model, tensor.name)
    return None if name is None or EACH in name else name


def _end(tensor: TensorPlace) -> int:
    return tensor.begin + tensor.num_bytes
