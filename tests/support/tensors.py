"""Arrays of an engine, of numpy or torch, as torch's, for comparisons with transformers and with definitions."""

from __future__ import annotations

from typing import Any

import torch

from ostinato.ops.arrays import TorchArrays, host_values


def as_tensor(array: Any) -> torch.Tensor:
    """The same memory, if it is the host's."""
    found: torch.Tensor = TorchArrays("cpu").sharing(host_values(array))
    return found
