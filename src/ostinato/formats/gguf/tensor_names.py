"""Names of a model's tensors in GGUF files, and the corresponding names of its checkpoint. Imports no torch.

The names are those of gguf-py (github.com/ggml-org/llama.cpp, gguf-py/gguf/constants.py and tensor_mapping.py).
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from ostinato.plan.weights import EACH as EACH

if TYPE_CHECKING:
    from ostinato.plan.model import ModelSpec

GATE, UP = ":gate", ":up"
"""Suffixes of a checkpoint tensor's name: the first or the second half of its rows.

They are for checkpoint tensors that a GGUF file has as two tensors.
"""

_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
}
_LLAMA = _ATTENTION | {
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _state(mixer: str) -> dict[str, str]:
    """Return the names of a Mamba-2 mixer."""
    names = {"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_norm": "norm", "ssm_out": "out_proj"}
    return {name: f"{mixer}.{value}" for name, value in names.items()}


_FEED_FORWARD = {
    "ffn_norm": "pre_ff_layernorm",
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
}
_SHARED = {"gate": f"shared_mlp.input_linear{GATE}", "up": f"shared_mlp.input_linear{UP}"}
_GRANITE = {
    **_ATTENTION,
    **_state("mamba"),
    "ffn_norm": "post_attention_layernorm",
    **{f"ffn_{part}{behind}": name for part, name in _SHARED.items() for behind in ("", "_shexp")},
    **{f"ffn_down{behind}": "shared_mlp.output_linear" for behind in ("", "_shexp")},
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_exps": f"block_sparse_moe.input_linear{GATE}",
    "ffn_up_exps": f"block_sparse_moe.input_linear{UP}",
    "ffn_down_exps": "block_sparse_moe.output_linear",
}
_NEMOTRON = {
    "attn_norm": "norm",
    **{f"attn_{part}": f"mixer.{part}_proj" for part in "qkv"},
    "attn_output": "mixer.o_proj",
    **_state("mixer"),
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "ffn_up_exps": f"mixer.experts.{EACH}.up_proj",
    "ffn_down_exps": f"mixer.experts.{EACH}.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}
_LFM2 = {
    "attn_norm": "operator_norm",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    **{f"attn_{part}_norm": f"self_attn.{part}_layernorm" for part in "qk"},
    "attn_output": "self_attn.out_proj",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
_QWEN35 = {
    **{name: value for name, value in _LLAMA.items() if name != "ffn_norm"},
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_LFM2_MOE = _LFM2 | {
    "ffn_gate_inp": "feed_forward.gate",
    **{f"ffn_{part}_exps": f"feed_forward.experts.{EACH}.w{i}" for i, part in ((1, "gate"), (3, "up"), (2, "down"))},
}
_QWEN35_MOE = {name: value for name, value in _QWEN35.items() if not name.startswith("ffn_")} | {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{part}_exps": f"mlp.experts.{EACH}.{part}_proj" for part in ("gate", "up", "down")},
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
}
_QWEN3_NEXT = _QWEN35_MOE | {"ssm_ba": "linear_attn.in_proj_ba"}
_IN_HEAD = {
    "nextn.eh_proj": "fc",
    "nextn.enorm": "pre_fc_norm_embedding",
    "nextn.hnorm": "pre_fc_norm_hidden",
    "nextn.shared_head_norm": "norm",
}
"""Names in the prediction head of models with delta nets, except its layer. In a file the head is one more block."""
_IN_LAYER: dict[str, dict[str, str]] = {
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "bamba": _ATTENTION | _state("mamba") | _FEED_FORWARD,
    "falcon_h1": _ATTENTION | _state("mamba") | _FEED_FORWARD,
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2_MOE,
    "qwen3_5_text": _QWEN35,
    "qwen3_5_moe_text": _QWEN35_MOE,
    "qwen3_next": _QWEN3_NEXT,
    "granitemoehybrid": _GRANITE,
    "mamba2": {"attn_norm": "norm"} | _state("mixer"),
    "nemotron_h": _NEMOTRON,
}
"""Names in a layer, by the `model_type` of its model; `.weight` or `.bias` follows each."""
_LESS_ONE = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
"""Models with delta nets whose checkpoints store a norm's weight w as w - 1."""
_MIXERS = {
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid"), "mamba"),
    **dict.fromkeys(_LESS_ONE, "linear_attn"),
}
_NORMS = {"bamba": "final_layernorm", "falcon_h1": "final_layernorm", "mamba2": "norm_f", "nemotron_h": "norm_f"}
_CHOICES = {"lfm2_moe": "feed_forward.expert_bias", "nemotron_h": "mixer.gate.e_score_correction_bias"}
"""Names of the bias that is added to experts' scores for their selection."""
_EMBEDDINGS = {"mamba2": "embeddings", "nemotron_h": "embeddings"}
_BARE = {"ssm_a": "A_log", "ssm_d": "D", "ssm_dt.bias": "dt_bias"}
"""Names in a mixer without `.weight` or `.bias`."""

CONVOLUTIONS = (".ssm_conv1d.weight", ".shortconv.conv.weight")

ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the frequencies of positions; this tensor is not a weight."""


def checkpoint_name(model: ModelSpec, name: str) -> str | None:
    """Return the checkpoint's name of a tensor of a GGUF file; None for an unknown name.

    `blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; in a model of three layers and a head it is
    `mtp.layers.0.self_attn.q_proj.weight`.
    """
    model_type = model.architecture
    backbone = "backbone" if model_type == "mamba2" else "model"
    stem, _, part = name.rpartition(".")
    if stem == "token_embd":
        return f"{backbone}.{_EMBEDDINGS.get(model_type, 'embed_tokens')}.{part}"
    if stem == "output_norm":
        return f"{backbone}.{_NORMS.get(model_type, 'norm')}.{part}"
    if stem == "token_embd_norm" and model_type in ("lfm2", "lfm2_moe"):
        # This norm follows the layers, in spite of its name.
        return f"{backbone}.embedding_norm.{part}"
    if stem == "output":
        return f"lm_head.{part}"
    found = re.fullmatch(r"blk\.(\d+)\.([\w.]+)", name)
    if found is None:
        return None
    number, inner = int(found[1]), found[2]
    if model.head is None or number < model.num_layers:
        return _in_layer(model_type, f"{backbone}.layers.{number}", inner)
    of_head = _IN_HEAD.get(inner.rpartition(".")[0])
    if of_head is not None:
        return f"mtp.{of_head}.{part}"
    return _in_layer(model_type, f"mtp.layers.{number - model.num_layers}", inner)


def _in_layer(model_type: str, layer: str, inner: str) -> str | None:
    """Return the checkpoint's name of tensor `inner` (the file's name for it) of `layer`."""
    if inner in _BARE:
        return f"{layer}.{_MIXERS.get(model_type, 'mixer')}.{_BARE[inner]}"
    if inner == "exp_probs_b.bias":
        return f"{layer}.{_CHOICES[model_type]}" if model_type in _CHOICES else None
    # Falcon-H1's files have one norm without a suffix.
    stem, _, part = inner.rpartition(".") if "." in inner else (inner, "", "weight")
    known = _IN_LAYER[model_type].get(stem)
    if known is None:
        return None
    for half in (GATE, UP):
        if known.endswith(half):
            return f"{layer}.{known.removesuffix(half)}.{part}{half}"
    return f"{layer}.{known}.{part}"


def checkpoint_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that a tensor has in a checkpoint.

    Only some tensors of mixers, and the one row of a gate, have another shape there.
    """
    if name.endswith(CONVOLUTIONS) and len(shape) == 2:
        return (shape[0], 1, shape[1])
    if name.endswith((".ssm_a", ".ssm_d", ".ssm_norm.weight")):
        return (math.prod(shape),)
    return (1, *shape) if name.endswith(".ffn_gate_inp_shexp.weight") and len(shape) == 1 else shape


def is_changed(name: str) -> bool:
    """Return whether `to_checkpoint_layout` must convert this tensor to the checkpoint's form."""
    return name.endswith((".ssm_a", ".ssm_d", ".ssm_norm.weight", *CONVOLUTIONS))


def stores_norm_plus_one(model_type: str, name: str) -> bool:
    """Return whether the file stores a norm's weight w where the checkpoint stores w - 1."""
    return model_type in _LESS_ONE and name.endswith("norm.weight") and not name.endswith(".ssm_norm.weight")


def has_adjacent_rope(model_type: str, name: str) -> bool:
    """Return whether, in each head, two rows of a tensor that positions rotate together are neighbours.

    In checkpoints they are half a head apart. This concerns queries and keys of Llama, Granite and Bamba.

    Some writers do the same to Nemotron-H. It has no positions, so its scores are the same in any order.
    """
    kinds = ("llama", "granitemoehybrid", "bamba")
    return model_type in kinds and re.fullmatch(r"blk\.\d+\.attn_[qk]\.(weight|bias)", name) is not None
