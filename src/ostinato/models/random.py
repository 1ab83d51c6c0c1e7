"""Random weights of a model's real shapes, for benchmarks without a checkpoint."""

from __future__ import annotations

import torch

from ostinato.layers.build import checkpoint_views
from ostinato.models.base import CausalLM


def randomize_weights(model: CausalLM, seed: int) -> None:
    """Fills every weight so that activations stay finite and of ordinary size at any depth and length.

    Matrices are normal with variance 1 / inputs, norms are 1, biases 0; a state layer's decay and time step lie in
    the ranges that Mamba-2 is initialised in (Dao and Gu 2024, appendix D).
    """
    generator = torch.Generator(device=model.build.device).manual_seed(seed)
    for name, view in checkpoint_views(model):
        kind = name.rpartition(".")[2]
        if kind == "A_log":
            view.uniform_(1, 16, generator=generator).log_()
        elif kind == "dt_bias":
            step = torch.empty_like(view).uniform_(0.001, 0.1, generator=generator)
            view.copy_(step + torch.log(-torch.expm1(-step)))
        elif view.dim() == 1:
            view.fill_(0.0 if kind.endswith("bias") else 1.0)
        else:
            view.normal_(0, view.shape[-1] ** -0.5, generator=generator)
