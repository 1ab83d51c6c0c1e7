"""The cache's memory: every layer's part of the blocks and slots that the plan counted."""

from __future__ import annotations

import torch

from ostinato.layers import pages
from ostinato.ops.step import LayerMemory
from ostinato.plan.model import LayerSpec, ModelSpec
from ostinato.plan.plan import Plan


def allocate_memory(spec: ModelSpec, plan: Plan, device: torch.device) -> list[LayerMemory]:
    """One LayerMemory per layer, the drafter's behind the model's, and behind them one for the hidden state that a
    prediction head keeps; unwritten: on a CPU the operating system backs a page when it is first used."""
    memory = [_allocate_layer(layer, plan, device) for layer in spec.cached_layers]
    if spec.drafter is not None and spec.drafter.hidden_elements:
        shape = (plan.memory.num_slots, 1, spec.drafter.hidden_elements)
        dtype = getattr(torch, plan.settings.dtype)
        memory.append(LayerMemory(conv_states=pages.empty(*shape, dtype=dtype, device=device)))
    return memory


def allocate_cells(spec: ModelSpec, plan: Plan, device: torch.device) -> list[LayerMemory]:
    """The encoder cache of a model that takes images, which stands behind the memory of its layers; unwritten too."""
    if plan.encoder is None or spec.vision is None:
        return []
    shape = (plan.encoder.num_cells, spec.vision.hidden_rows, spec.vision.out_hidden_size)
    dtype = getattr(torch, plan.settings.dtype)
    return [LayerMemory(media=pages.empty(*shape, dtype=dtype, device=device))]


def _allocate_layer(layer: LayerSpec, plan: Plan, device: torch.device) -> LayerMemory:
    settings, memory = plan.settings, plan.memory
    dtype = getattr(torch, settings.dtype)
    parts: dict[str, torch.Tensor] = {}
    if layer.attention is not None:
        heads = (layer.attention.num_kv_heads, layer.attention.head_dim)
        shape = (memory.num_blocks, settings.block_size, *heads)
        parts["k_cache"] = pages.empty(*shape, dtype=dtype, device=device)
        parts["v_cache"] = pages.empty(*shape, dtype=dtype, device=device)
    if layer.mamba2 is not None:
        spec, slots = layer.mamba2, memory.num_slots
        ssm_dtype = getattr(torch, settings.ssm_state_dtype)
        conv, ssm = (spec.conv_kernel - 1, spec.conv_dim), (spec.num_heads, spec.head_dim, spec.state_size)
        parts["conv_states"] = pages.empty(slots, *conv, dtype=dtype, device=device)
        parts["ssm_states"] = pages.empty(slots, *ssm, dtype=ssm_dtype, device=device)
    return LayerMemory(**parts)
