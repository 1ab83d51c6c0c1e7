"""The config.json of models with delta nets, from GGUF metadata. Imports no torch."""

from __future__ import annotations

from typing import Any

from ostinato.errors import ModelError
from ostinato.formats.gguf.attention import attention
from ostinato.formats.gguf.experts import SOFTMAX, expect_gates, expert_size
from ostinato.formats.gguf.hybrids import mixer_heads
from ostinato.formats.gguf.metadata import Metadata


def qwen35(metadata: Metadata) -> dict[str, Any]:
    return _qwen35(metadata) | {
        "model_type": "qwen3_5_text",
        "intermediate_size": metadata.integer("feed_forward_length"),
    }


def qwen35_moe(metadata: Metadata) -> dict[str, Any]:
    """Return the config of Qwen3.5 with experts in every layer."""
    return _qwen35(metadata) | {"model_type": "qwen3_5_moe_text"} | _experts(metadata)


def qwen3_next(metadata: Metadata) -> dict[str, Any]:
    """Return the config of Qwen3-Next, which is like Qwen3.5 with experts.

    Value heads are in the order of a checkpoint. So are betas and decays, by key head; queries, keys, values and gates
    are not.
    """
    apart = {"model_type": "qwen3_next", "linear_projections_apart": True, "linear_keys_take_turns": False}
    return _qwen35(metadata, "ssm_ba.weight") | apart | _experts(metadata)


def _experts(metadata: Metadata) -> dict[str, Any]:
    """Return the settings of experts. The weights of the selected ones add up to 1.

    Raises ModelError for a file that says otherwise.
    """
    expect_gates(metadata, SOFTMAX)
    if metadata.optional("expert_weights_norm") is False or metadata.number("expert_weights_scale", 1.0) != 1.0:
        raise ModelError(
            f"{metadata.header.path} says that the weights of chosen experts do not add up to 1 (expert_weights_norm, "
            f"expert_weights_scale); those of {metadata.architecture} do"
        )
    return {
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "moe_intermediate_size": expert_size(metadata),
        "shared_expert_intermediate_size": metadata.rows("ffn_up_shexp.weight"),
        "norm_topk_prob": True,
    }


def _qwen35(metadata: Metadata, of_delta_nets: str = "ssm_alpha.weight") -> dict[str, Any]:
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
