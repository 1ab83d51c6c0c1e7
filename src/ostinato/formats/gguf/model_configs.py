"""Parts of a config.json from GGUF metadata: heads, positions, experts. Imports no torch.

The kind of a layer follows from its tensors. The metadata have it too, as numbers of heads and sizes of MLPs by layer,
but writers have got these wrong for models whose config.json spells its layers in a new way.
"""

from __future__ import annotations

from collections.abc import Sequence

from ostinato.errors import ModelError
from ostinato.formats.gguf.metadata import Metadata, rope_scaling
from ostinato.json_io import JsonObject

ATTENTION_BIASES = tuple(f"attn_{part}.bias" for part in ("q", "k", "v", "output"))
MLP_BIASES = tuple(f"ffn_{part}.bias" for part in ("gate", "up", "down"))
"""Biases that a file may have in part. The model has all of them, and those that the file lacks are zero."""


def attention(metadata: Metadata, *, heads_of_layers: bool = False, rotates_parts: bool = False) -> JsonObject:
    """Return heads and positions, as in a config.json.

    Raises ModelError for heads that are rotated in part, unless the model `rotates_parts`. With `heads_of_layers` the
    file has a number of key heads for each layer, which is 0 in layers of another kind.
    """
    heads = metadata.integer("attention.head_count")
    head_dim = metadata.optional("attention.key_length") or metadata.rows("attn_q.weight") // max(heads, 1)
    head_dim = head_dim or metadata.integer("embedding_length") // max(heads, 1)
    rotated = metadata.integer("rope.dimension_count", head_dim)
    if rotated != head_dim and not rotates_parts:
        raise ModelError(
            f"{metadata.header.path} rotates {rotated} elements of heads of {head_dim} (rope.dimension_count); "
            "supported: all of them"
        )
    name = "attention.head_count_kv"
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.largest(name) if heads_of_layers else metadata.optional(name) or heads,
        "head_dim": head_dim,
        "attention_bias": metadata.has(*ATTENTION_BIASES),
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
        "rope_scaling": rope_scaling(metadata),
    }


def gemma2(metadata: Metadata) -> JsonObject:
    """Return the config of Gemma 2.

    Which layers have a window and the scale of scores are in llama.cpp's code: only the model of 27B, with 46 layers,
    is scaled by another size than that of a head.
    """
    heads = attention(metadata)
    is_27b = metadata.num_layers == _GEMMA2_27B
    scaled_by = metadata.integer("embedding_length") // max(heads["num_attention_heads"], 1)
    return {
        "model_type": "gemma2",
        **heads,
        "query_pre_attn_scalar": scaled_by if is_27b else heads["head_dim"],
        "sliding_window": metadata.integer("attention.sliding_window", 4096),
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
        "intermediate_size": metadata.integer("feed_forward_length"),
    }


def gemma3(metadata: Metadata) -> JsonObject:
    """Return the config of Gemma 3's text model.

    Files say neither which layers have a window, nor the theta of these, nor the scale of scores. llama.cpp has these
    in its code, the scale by the number of layers: only the model of 27B, with 62, has another one.
    """
    heads, window = attention(metadata), metadata.optional("attention.sliding_window")
    is_27b = metadata.num_layers == _GEMMA3_27B
    scaled_by = metadata.integer("embedding_length") // max(heads["num_attention_heads"], 1)
    return {
        "model_type": "gemma3_text",
        **heads,
        "rope_local_base_freq": metadata.number("rope.freq_base_swa", 10000.0),
        "query_pre_attn_scalar": scaled_by if is_27b else heads["head_dim"],
        "sliding_window": window,
        "sliding_window_pattern": metadata.integer("attention.sliding_window_pattern", 6) if window else 1,
        "final_logit_softcapping": metadata.optional("final_logit_softcapping"),
        "intermediate_size": metadata.integer("feed_forward_length"),
    }


_ENDLESS = 1e29
"""Divisor from which on a frequency counts as 0: Gemma 4's files have 1e30 for elements that are not rotated."""


def gemma4(metadata: Metadata) -> JsonObject:
    """Return the config of Gemma 4's text model, whose files list key heads and widths of MLPs that differ by layer."""
    path = metadata.header.path
    num_experts = metadata.integer("expert_count", 0)
    slides = [bool(slid) for slid in metadata.of_layers("attention.sliding_window_pattern")]
    key_heads, widths = metadata.of_layers("attention.head_count_kv"), metadata.of_layers("feed_forward_length")
    shared, first_full = metadata.integer("attention.shared_kv_layers", 0), slides.index(False)
    local_dim = metadata.integer("attention.key_length_swa")
    own = max(len(slides) - shared, 0)
    is_wide = shared > 0 and widths[-1] == 2 * widths[0]
    if widths != [widths[0]] * own + [widths[-1]] * (len(slides) - own) or (widths[-1] != widths[0] and not is_wide):
        raise ModelError(
            f"{path} has gemma4.feed_forward_length = {widths}; supported: one width, and twice as much in the last "
            f"{shared} layers, which read the keys of others"
        )
    if metadata.integer("rope.dimension_count_swa", local_dim) != local_dim:
        raise ModelError(
            f"{path} rotates some of the {local_dim} elements of heads with a window (rope.dimension_count_swa); "
            "supported: all of them"
        )
    divisors = (rope_scaling(metadata) or {}).get("factors", [1.0])
    rotated = sum(divisor < _ENDLESS for divisor in divisors)
    if divisors != [1.0] * rotated + divisors[rotated:]:
        raise ModelError(f"{path} scales its positions by rope_freqs.weight; supported for gemma4: 1, then 1e30")
    return {
        "model_type": "gemma4_text",
        "num_attention_heads": metadata.integer("attention.head_count"),
        "num_key_value_heads": key_heads[slides.index(True)] if True in slides else key_heads[0],
        "num_global_key_value_heads": key_heads[first_full],
        "head_dim": local_dim,
        "global_head_dim": metadata.integer("attention.key_length"),
        "attention_k_eq_v": f"blk.{first_full}.attn_v.weight" not in metadata.header.tensors,
        "attention_bias": metadata.has(*ATTENTION_BIASES),
        "layer_types": _kinds(slides),
        "sliding_window": metadata.optional("attention.sliding_window"),
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": metadata.number("rope.freq_base", 1e6),
                "partial_rotary_factor": rotated / len(divisors),
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base_swa", 1e4)},
        },
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": is_wide,
        "intermediate_size": widths[0],
        "hidden_size_per_layer_input": metadata.integer("embedding_length_per_layer_input", 0),
        "enable_moe_block": num_experts > 0,
        "num_experts": num_experts,
        "top_k_experts": metadata.integer("expert_used_count", 0),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length", 0),
        "final_logit_softcapping": metadata.optional("final_logit_softcapping"),
    }


_GEMMA2_27B, _GEMMA3_27B = 46, 62
"""Layers of the models of 27B."""

SOFTMAX, SIGMOID = 1, 2
"""Values of `expert_gating_func` (gguf-py, gguf/constants.py)."""

_NAMES = {SOFTMAX: "softmax", SIGMOID: "sigmoid"}


def expert_size(metadata: Metadata) -> int:
    """Return the size of an expert's inner activations."""
    return metadata.rows("ffn_up_exps.weight") or metadata.integer("expert_feed_forward_length")


def expect_gates(metadata: Metadata, expected: int) -> None:
    """Raise ModelError if the file says that experts' weights come from another function than its models have."""
    found = metadata.integer("expert_gating_func", expected)
    if found != expected:
        raise ModelError(
            f"{metadata.header.path} has {metadata.architecture}.expert_gating_func = {found}; supported for "
            f"{metadata.architecture}: {expected} ({_NAMES[expected]})"
        )


def granite(metadata: Metadata) -> JsonObject:
    """Return the config of Granite, which is Granite 4 without state layers, with experts or without."""
    layers = {"layer_types": ["attention"] * metadata.num_layers, "position_embedding_type": "rope"}
    # No layer has a mixer of this size.
    without = {"mamba_n_heads": 1, "mamba_d_head": "auto", "mamba_expand": 1}
    return granite_settings(metadata) | attention(metadata) | layers | without


def granite_swa(metadata: Metadata) -> JsonObject:
    """Return the config of Granite with windows, with experts or without; a layer has the one rotary base or none."""
    heads, experts = attention(metadata), metadata.integer("expert_count", 0)
    rotates = metadata.of_layers("attention.rope_pattern", 1)
    config = {
        **heads,
        **_multipliers(metadata, heads["head_dim"]),
        "model_type": "granitemoe_swa" if experts else "granite_swa",
        "intermediate_size": metadata.integer("feed_forward_length"),
        "mlp_bias": metadata.has(*MLP_BIASES),
        "sliding_window": metadata.integer("attention.sliding_window"),
        "layer_types": _kinds(metadata.of_layers("attention.sliding_window_pattern")),
        "layer_rope_theta": [heads["rope_theta"] if rotated else 0 for rotated in rotates],
    }
    if not experts:
        return config
    return config | {
        "num_local_experts": experts,
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "shared_intermediate_size": metadata.integer("expert_shared_feed_forward_length", 0),
    }


def _kinds(slides: Sequence[int]) -> list[str]:
    return ["sliding_attention" if slid else "full_attention" for slid in slides]


def _windows(metadata: Metadata, pattern: int) -> JsonObject:
    """Return the window, and the layers that have it: a list of truth values, or all but every `pattern`-th."""
    layers = metadata.optional("attention.sliding_window_pattern")
    window = metadata.integer("attention.sliding_window", 0) or None
    if window is None:
        return {"sliding_window": None, "layer_types": ["full_attention"] * metadata.num_layers}
    if isinstance(layers, int) or layers is None:
        return {"sliding_window": window, "sliding_window_pattern": layers or pattern}
    return {"sliding_window": window, "layer_types": _kinds(layers)}


def _dense(metadata: Metadata, model_type: str) -> JsonObject:
    size = metadata.integer("feed_forward_length")
    return {"model_type": model_type, **attention(metadata), "intermediate_size": size}


def exaone4(metadata: Metadata) -> JsonObject:
    return _dense(metadata, "exaone4") | _windows(metadata, 4)


def olmo3(metadata: Metadata) -> JsonObject:
    """Return the config of OLMo 3; OLMo 2, which is the same without windows, has the same name in files."""
    dense = _dense(metadata, "olmo3")
    local = {"sliding_attention": {"rope_theta": dense["rope_theta"]}}
    return dense | _windows(metadata, 4) | {"rope_parameters": local}


def cohere2(metadata: Metadata) -> JsonObject:
    """Return the config of Cohere 2, whose norms are layer norms."""
    own = {"layer_norm_eps": metadata.norm_eps, "logit_scale": metadata.number("logit_scale")}
    return _dense(metadata, "cohere2") | _windows(metadata, 4) | own


def ministral3(metadata: Metadata) -> JsonObject:
    """Return the config of Ministral 3, which may have neither scaled positions nor queries that grow."""
    config = _dense(metadata, "ministral3")
    plain = {"rope_type": "default", "original_max_position_embeddings": metadata.integer("context_length")}
    rope = (config["rope_scaling"] or plain) | {
        "llama_4_scaling_beta": metadata.number("attention.temperature_scale", 0.0)
    }
    if metadata.optional("rope.scaling.yarn_log_multiplier"):
        rope |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    return config | {"rope_scaling": rope}


def phi3(metadata: Metadata) -> JsonObject:
    heads = attention(metadata, rotates_parts=True)
    rotated = metadata.integer("rope.dimension_count", heads["head_dim"])
    return {
        "model_type": "phi3",
        **heads,
        "intermediate_size": metadata.integer("feed_forward_length"),
        "sliding_window": metadata.optional("attention.sliding_window") or None,
        "original_max_position_embeddings": metadata.integer(
            "rope.scaling.original_context_length", metadata.integer("context_length")
        ),
        "partial_rotary_factor": rotated / max(heads["head_dim"], 1),
    }


def ernie(metadata: Metadata) -> JsonObject:
    """Return the config of Ernie 4.5, all of whose projections have biases, or none."""
    return _dense(metadata, "ernie4_5") | {"use_bias": metadata.has(*ATTENTION_BIASES, *MLP_BIASES)}


def granite_settings(metadata: Metadata) -> JsonObject:
    """Return the settings of Granite 4 that do not depend on its mixers."""
    heads = max(metadata.integer("attention.head_count"), 1)
    experts = metadata.integer("expert_count", 0)
    shared = "ffn_up_shexp.weight" if experts else "ffn_up.weight"
    return {
        "model_type": "granitemoehybrid",
        "num_local_experts": experts,
        "num_experts_per_tok": metadata.integer("expert_used_count", 0),
        "intermediate_size": metadata.rows("ffn_up_exps.weight", 1),
        "shared_intermediate_size": metadata.rows(shared),
        **_multipliers(metadata, metadata.rows("attn_q.weight", heads) // heads),
    }


def _multipliers(metadata: Metadata, head_dim: int) -> JsonObject:
    """Return the four multipliers of Granite."""
    return {
        "embedding_multiplier": metadata.number("embedding_scale", 1.0),
        "residual_multiplier": metadata.number("residual_scale", 1.0),
        "logits_scaling": metadata.number("logit_scale", 1.0),
        "attention_multiplier": metadata.number("attention.scale", head_dim**-0.5),
    }


def gpt_oss(metadata: Metadata) -> JsonObject:
    """Return the config of gpt-oss. Files say which window layers have, not which layers have it: every other one."""
    config = attention(metadata)
    if config["rope_scaling"] is not None:
        config["rope_scaling"]["truncate"] = False
    return config | {
        "model_type": "gpt_oss",
        "intermediate_size": expert_size(metadata),
        "num_local_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "sliding_window": metadata.integer("attention.sliding_window"),
    }


def qwen3_moe(metadata: Metadata) -> JsonObject:
    """Return the config of Qwen3 with experts in every layer."""
    return attention(metadata) | {"model_type": "qwen3_moe", "intermediate_size": 0} | top_experts(metadata)


def youtu(metadata: Metadata) -> JsonObject:
    """Return the config of Youtu-LLM, for llama.cpp `deepseek2`. ModelError for DeepSeek's models of experts."""
    if metadata.optional("expert_count"):
        raise ModelError(
            f"{metadata.header.path} has a deepseek2 model of experts; GGUF files are read of models without: Youtu-LLM"
        )
    rotated = metadata.integer("rope.dimension_count")
    return {
        "model_type": "youtu",
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_attention_heads": metadata.integer("attention.head_count"),
        "q_lora_rank": metadata.optional("attention.q_lora_rank"),
        "kv_lora_rank": metadata.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": metadata.integer("attention.key_length_mla") - rotated,
        "v_head_dim": metadata.integer("attention.value_length_mla"),
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
        "rope_scaling": rope_scaling(metadata),
    }


def mixtral_experts(metadata: Metadata) -> JsonObject:
    """Return the settings of Mixtral's experts. ModelError if the weights of the chosen ones do not add up to 1."""
    experts = top_experts(metadata)
    return {
        "model_type": "mixtral",
        "num_local_experts": experts["num_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "intermediate_size": experts["moe_intermediate_size"],
    }


def top_experts(metadata: Metadata) -> JsonObject:
    """Return the settings of experts, whose selected weights add up to 1. ModelError if a file says otherwise."""
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
