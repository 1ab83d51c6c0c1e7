"""Runs of tensors of a GGUF file that can be read in place. Imports no torch.

A matmul may need several tensors as one matrix, such as gates and what they gate. They are one matrix if they are
adjacent in the file, as most writers put these two. Tensors whose rows a checkpoint has in another order, such as
queries and keys of Llama, are copied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostinato.formats.gguf.header import Header, GgufTensor
from ostinato.formats.gguf.names import EACH, GATE, UP, checkpoint_name, has_adjacent_rope
from ostinato.ops.blocks.formats import BLOCK_FORMATS

if TYPE_CHECKING:
    from ostinato.plan.model import ModelSpec


def find_contiguous_tensors(header: Header, model: ModelSpec) -> tuple[tuple[str, ...], ...]:
    """Return the matrices in blocks, by the checkpoint's names, in runs of adjacent ones.

    Experts are not among them.
    """
    runs: list[list[str]] = []
    before: GgufTensor | None = None
    gate: GgufTensor | None = None
    for tensor in sorted(header.tensors.values(), key=lambda tensor: (tensor.file, tensor.begin)):
        name = _name(tensor, model)
        if name is None:
            before = gate = None
            continue
        follows = before is not None and (before.file, _end(before)) == (tensor.file, tensor.begin)
        if name.endswith(GATE):
            # The run continues if the other half comes next.
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


def _name(tensor: GgufTensor, model: ModelSpec) -> str | None:
    """Return the checkpoint's name of a tensor; None if it is not read in place."""
    is_other_order = has_adjacent_rope(model.architecture, tensor.name)
    if tensor.type.name not in BLOCK_FORMATS or len(tensor.shape) != 2 or is_other_order:
        return None
    name = checkpoint_name(model, tensor.name)
    return None if name is None or EACH in name else name


def _end(tensor: GgufTensor) -> int:
    return tensor.begin + tensor.num_bytes
