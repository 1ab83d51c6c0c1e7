"""The config.json of models with state layers from GGUF metadata. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from ostinato.errors import ModelError
from ostinato.formats.gguf.metadata import Metadata
from ostinato.formats.gguf.model_configs import (
    ATTENTION_BIASES,
    MLP_BIASES,
    SIGMOID,
    attention,
    expect_gates,
    expert_size,
    granite_settings,
    top_experts,
)
from ostinato.json_io import JsonObject

_CHUNK = 256
"""Tokens that a prefill computes at once in state layers.

Files do not contain it, and it changes results only by rounding.
"""


def granite_hybrid(metadata: Metadata) -> JsonObject:
    """Return the config of Granite 4, or Bamba: for llama.cpp a Granite 4 with positions and without multipliers."""
    kinds = metadata.kinds(mamba="ssm_in.weight", attention="attn_q.weight")
    has_positions = bool(metadata.optional("rope.scaling.finetuned"))
    multipliers = ("embedding_scale", "residual_scale", "logit_scale", "attention.scale")
    mixer = _mamba(metadata) if "mamba" in kinds else {"mamba_n_heads": 1, "mamba_d_head": "auto", "mamba_expand": 1}
    heads = _heads(metadata)
    if has_positions and "mamba" in kinds and not any(metadata.optional(name) for name in multipliers):
        return {
            "model_type": "bamba",
            **mixer,
            **heads,
            "rope_theta": metadata.number("rope.freq_base", 10000.0),
            "attn_layer_indices": [i for i, kind in enumerate(kinds) if kind == "attention"],
            "intermediate_size": metadata.integer("feed_forward_length"),
        }
    positions = {"position_embedding_type": "rope" if has_positions else "nope", "layer_types": kinds}
    theta = {"rope_theta": metadata.number("rope.freq_base", 10000.0)} if has_positions else {}
    return granite_settings(metadata) | mixer | heads | positions | theta


def falcon_h1(metadata: Metadata) -> JsonObject:
    """Return the config of Falcon-H1. The weights include all multipliers; the gate is before the norm, if any."""
    return {
        "model_type": "falcon_h1",
        **_mamba(metadata),
        **attention(metadata),
        "intermediate_size": metadata.integer("feed_forward_length"),
        "mamba_d_ssm": metadata.integer("ssm.inner_size"),
        "mamba_rms_norm": metadata.has("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": metadata.has("ssm_out.bias"),
        "mlp_bias": metadata.has(*MLP_BIASES),
    }


def nemotron_h(metadata: Metadata) -> JsonObject:
    """Return the config of Nemotron-H, whose layers include MLPs or experts, or both."""
    kinds = metadata.kinds(
        mamba="ssm_in.weight", attention="attn_q.weight", moe="ffn_up_exps.weight", mlp="ffn_up.weight"
    )
    heads, head_dim, of_mixer = *mixer_heads(metadata), _mamba(metadata)
    config = {
        "model_type": "nemotron_h",
        "layers_block_type": kinds,
        **_heads(metadata),
        "mamba_num_heads": heads,
        "mamba_head_dim": head_dim,
        "ssm_state_size": of_mixer["mamba_d_state"],
        "n_groups": of_mixer["mamba_n_groups"],
        "conv_kernel": of_mixer["mamba_d_conv"],
        "chunk_size": _CHUNK,
        "use_bias": of_mixer["mamba_proj_bias"],
        "use_conv_bias": of_mixer["mamba_conv_bias"],
        "intermediate_size": metadata.rows("ffn_up.weight"),
        "mlp_bias": metadata.has(*MLP_BIASES, "ffn_up_shexp.bias", "ffn_down_shexp.bias"),
        "layer_norm_epsilon": metadata.norm_eps,
    }
    return config | (_nemotron_experts(metadata) if "moe" in kinds else {})


def _nemotron_experts(metadata: Metadata) -> JsonObject:
    return {
        "n_routed_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "moe_intermediate_size": metadata.rows("ffn_up_exps.weight"),
        "moe_shared_expert_intermediate_size": metadata.rows("ffn_up_shexp.weight"),
        "moe_latent_size": metadata.rows("ffn_latent_down.weight") or None,
        "norm_topk_prob": bool(metadata.optional("expert_weights_norm")),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "n_group": metadata.integer("expert_group_count", 1),
        "topk_group": metadata.integer("expert_group_used_count", 1),
    }


def _mamba1(metadata: Metadata) -> tuple[int, int, int, int]:
    """Return Mamba-1's number of channels, states of each, taps of the convolution, and rank of time steps."""
    names = ("inner_size", "state_size", "conv_kernel", "time_step_rank")
    channels, states, taps, rank = (metadata.integer(f"ssm.{name}") for name in names)
    return channels, states, taps, rank


def mamba(metadata: Metadata) -> JsonObject:
    """Return the config of Mamba, or of Falcon-Mamba, the epsilon of whose inner norms is not in files: its default."""
    channels, states, taps, rank = _mamba1(metadata)
    return {
        "model_type": "falcon_mamba" if metadata.optional("ssm.dt_b_c_rms") else "mamba",
        "max_position_embeddings": None,
        "intermediate_size": channels,
        "state_size": states,
        "conv_kernel": taps,
        "time_step_rank": rank,
        "use_bias": metadata.has("ssm_in.bias", "ssm_out.bias"),
        "use_conv_bias": metadata.has("ssm_conv1d.bias"),
        "layer_norm_epsilon": metadata.norm_eps,
    }


def jamba(metadata: Metadata) -> JsonObject:
    """Return the config of Jamba, whose layers with attention, and those with experts, have a period each."""
    channels, states, taps, rank = _mamba1(metadata)
    kinds = metadata.kinds(mamba="ssm_in.weight", attention="attn_q.weight")
    experts = [f"blk.{i}.ffn_gate_inp.weight" in metadata.header.tensors for i in range(metadata.num_layers)]
    hidden = max(metadata.integer("embedding_length"), 1)
    if channels % hidden:
        raise ModelError(
            f"{metadata.header.path} has ssm.inner_size = {channels}, which should be a multiple of embedding_length = "
            f"{hidden}"
        )
    return {
        "model_type": "jamba",
        **_heads(metadata),
        **_every(metadata, "attn_layer", [kind == "attention" for kind in kinds]),
        **_every(metadata, "expert_layer", experts),
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_experts": metadata.integer("expert_count", 1) if any(experts) else 1,
        "num_experts_per_tok": metadata.integer("expert_used_count", 1),
        "mamba_expand": channels // hidden,
        "mamba_d_state": states,
        "mamba_d_conv": taps,
        "mamba_dt_rank": rank,
        "mamba_proj_bias": metadata.has("ssm_in.bias", "ssm_out.bias"),
        "mamba_conv_bias": metadata.has("ssm_conv1d.bias"),
    }


def _every(metadata: Metadata, name: str, are_such: Sequence[bool]) -> JsonObject:
    """Return the period and the offset of the layers that are such. ModelError if they have none."""
    places = [i for i, is_such in enumerate(are_such) if is_such]
    offset = places[0] if places else len(are_such)
    period = places[1] - offset if len(places) > 1 else len(are_such) + 1
    if [i % period == offset for i in range(len(are_such))] != list(are_such):
        raise ModelError(
            f"{metadata.header.path}: layers {places} are of one kind ({name}); supported: one in each period"
        )
    return {f"{name}_period": period, f"{name}_offset": offset}


def mamba2(metadata: Metadata) -> JsonObject:
    """Return the config of Mamba-2. Its context length is arbitrary, since the model has no positions."""
    (heads, head_dim), mixer = mixer_heads(metadata), _mamba(metadata)
    return {
        "model_type": "mamba2",
        "max_position_embeddings": None,
        "num_heads": heads,
        "head_dim": head_dim,
        "expand": mixer["mamba_expand"],
        "state_size": mixer["mamba_d_state"],
        "n_groups": mixer["mamba_n_groups"],
        "conv_kernel": mixer["mamba_d_conv"],
        "chunk_size": _CHUNK,
        "use_bias": mixer["mamba_proj_bias"],
        "use_conv_bias": mixer["mamba_conv_bias"],
        "layer_norm_epsilon": metadata.norm_eps,
    }


def lfm2(metadata: Metadata) -> JsonObject:
    """Return the config of LFM2. The file has the size of its MLP after all adjustments."""
    return {
        "model_type": "lfm2",
        **attention(metadata, heads_of_layers=True),
        "layer_types": metadata.kinds(conv="shortconv.conv.weight", full_attention="attn_q.weight"),
        "conv_L_cache": metadata.integer("shortconv.l_cache"),
        "conv_bias": metadata.has(*(f"shortconv.{part}.bias" for part in ("in_proj", "conv", "out_proj"))),
        "intermediate_size": metadata.integer("feed_forward_length"),
        "block_auto_adjust_ff_dim": False,
        "norm_eps": metadata.norm_eps,
    }


def lfm2_moe(metadata: Metadata) -> JsonObject:
    """Return the config of LFM2 with experts after the first layers."""
    expect_gates(metadata, SIGMOID)
    return lfm2(metadata) | {
        "model_type": "lfm2_moe",
        "num_dense_layers": metadata.integer("leading_dense_block_count", 0),
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "moe_intermediate_size": expert_size(metadata),
        "use_expert_bias": metadata.has("exp_probs_b.bias"),
        "norm_topk_prob": metadata.optional("expert_weights_norm") is not False,
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
    }


def _mamba(metadata: Metadata) -> JsonObject:
    """Return the settings of a mixer, in the keys of Bamba, Granite and Falcon-H1."""
    heads, head_dim = mixer_heads(metadata)
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": head_dim,
        "mamba_expand": heads * head_dim // max(metadata.integer("embedding_length"), 1),
        "mamba_d_state": metadata.integer("ssm.state_size"),
        "mamba_n_groups": metadata.integer("ssm.group_count", 1),
        "mamba_d_conv": metadata.integer("ssm.conv_kernel"),
        "mamba_chunk_size": _CHUNK,
        "mamba_proj_bias": metadata.has("ssm_in.bias", "ssm_out.bias"),
        "mamba_conv_bias": metadata.has("ssm_conv1d.bias"),
    }


def mixer_heads(metadata: Metadata) -> tuple[int, int]:
    """Return the number of heads, and the elements of each."""
    heads, size = metadata.integer("ssm.time_step_rank"), metadata.integer("ssm.inner_size")
    if heads < 1 or size % heads:
        raise ModelError(
            f"{metadata.header.path} has {heads} state heads (ssm.time_step_rank), which cannot share {size}"
        )
    return heads, size // heads


def _heads(metadata: Metadata) -> JsonObject:
    """Return the heads of the attention layers among others."""
    heads = metadata.integer("attention.head_count")
    head_dim = metadata.rows("attn_q.weight", heads) // max(heads, 1)
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.rows("attn_k.weight", head_dim) // max(head_dim, 1),
        "head_dim": head_dim,
        "attention_bias": metadata.has(*ATTENTION_BIASES),
    }


def kimi_linear(metadata: Metadata) -> JsonObject:
    """Return the config of Kimi Linear, whose latent attention has no positions."""
    expect_gates(metadata, SIGMOID)
    heads, rotated = metadata.integer("attention.head_count"), metadata.integer("rope.dimension_count")
    tensors, size = metadata.header.tensors, expert_size(metadata)
    sparse = [f"blk.{i}.ffn_gate_inp.weight" in tensors for i in range(metadata.num_layers)]
    return {
        "model_type": "kimi_linear",
        "layer_types": metadata.kinds(linear_attention="ssm_a", full_attention="attn_kv_a_mqa.weight"),
        "mlp_layer_types": ["sparse" if is_sparse else "dense" for is_sparse in sparse],
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": metadata.optional("attention.q_lora_rank"),
        "kv_lora_rank": metadata.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": metadata.integer("attention.key_length_mla") - rotated,
        "v_head_dim": metadata.integer("attention.value_length_mla"),
        "linear_head_dim": metadata.integer("kda.head_dim"),
        "linear_num_heads": metadata.rows("ssm_beta.weight"),
        "linear_conv_kernel_dim": metadata.integer("ssm.conv_kernel"),
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_token": metadata.integer("expert_used_count"),
        "moe_intermediate_size": size,
        "num_shared_experts": metadata.rows("ffn_up_shexp.weight") // max(size, 1),
        "moe_renormalize": metadata.optional("expert_weights_norm") is not False,
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "num_expert_group": metadata.integer("expert_group_count", 1),
        "topk_group": metadata.integer("expert_group_used_count", 1),
    }


def qwen35(metadata: Metadata) -> JsonObject:
    return _qwen35(metadata) | {
        "model_type": "qwen3_5_text",
        "intermediate_size": metadata.integer("feed_forward_length"),
    }


def qwen35_moe(metadata: Metadata) -> JsonObject:
    """Return the config of Qwen3.5 with experts in every layer."""
    return _qwen35(metadata) | {"model_type": "qwen3_5_moe_text"} | top_experts(metadata)


def qwen3_next(metadata: Metadata) -> JsonObject:
    """Return the config of Qwen3-Next, which is like Qwen3.5 with experts.

    Value heads are in the order of a checkpoint. So are betas and decays, by key head; queries, keys, values and gates
    are not.
    """
    apart = {"model_type": "qwen3_next", "linear_projections_apart": True, "linear_keys_take_turns": False}
    return _qwen35(metadata, "ssm_ba.weight") | apart | top_experts(metadata)


def _qwen35(metadata: Metadata, of_delta_nets: str = "ssm_alpha.weight") -> JsonObject:
    """Return the settings that all models with delta nets share.

    If several value heads share a key head, a file has the first one of every key head, then the second ones, and so
    on; a checkpoint has those of a key head side by side. Blocks cannot be put in the checkpoint's order, as the
    columns of the last projection would cut through them. So the model keeps the order of the heads in the file.
    """
    value_heads, value_dim = mixer_heads(metadata)
    key_heads = metadata.integer("ssm.group_count")
    head_dim = metadata.integer("attention.key_length")
    return {
        **attention(metadata, rotates_parts=True),
        "mtp_num_hidden_layers": metadata.num_head_layers,
        "mtp_use_dedicated_embeddings": _has_own_embedding(metadata),
        "partial_rotary_factor": metadata.integer("rope.dimension_count", head_dim) / max(head_dim, 1),
        "layer_types": metadata.kinds(linear_attention=of_delta_nets, full_attention="attn_q.weight"),
        "linear_num_value_heads": value_heads,
        "linear_num_key_heads": key_heads,
        "linear_keys_take_turns": value_heads != key_heads,
        "linear_key_head_dim": metadata.integer("ssm.state_size"),
        "linear_value_head_dim": value_dim,
        "linear_conv_kernel_dim": metadata.integer("ssm.conv_kernel"),
    }


def _has_own_embedding(metadata: Metadata) -> bool:
    """Return whether a prediction head has an embedding or an LM head besides the model's."""
    own = ("embed_tokens", "shared_head_head")
    return any(f"blk.{metadata.num_layers}.nextn.{name}.weight" in metadata.header.tensors for name in own)
