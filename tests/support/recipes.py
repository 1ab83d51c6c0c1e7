"""Configurations of tiny models of every architecture, as transformers writes them.

A recipe leaves no multiplier, bias, group count or limit at a value that would hide a mistake in it. A new
architecture is one recipe here: every test that is parametrised over `RECIPES` then covers it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers
from transformers import PretrainedConfig

VOCAB_SIZE = 131
EOS = 1
"""An end token that random prompts do not contain and tests switch off with `ignore_eos`."""

COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "bos_token_id": 0,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "max_position_embeddings": 512,
}

FALCON_MULTIPLIERS = {
    "embedding_multiplier": 5.0,
    "lm_head_multiplier": 0.3,
    "key_multiplier": 0.6,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.7,
    "ssm_multipliers": [0.9, 1.4, 0.55, 1.1, 0.45],
    "mlp_multipliers": [1.6, 0.65],
}


def llama() -> PretrainedConfig:
    return transformers.LlamaConfig(
        **COMMON,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        attention_bias=True,
        mlp_bias=True,
        rms_norm_eps=1e-4,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 3.0,
            "original_max_position_embeddings": 64,
        },
    )


def arcee() -> PretrainedConfig:
    return transformers.ArceeConfig(
        **COMMON,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        attention_bias=True,
        mlp_bias=True,
        rms_norm_eps=1e-4,
        tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 5000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    )


def nemotron_h() -> PretrainedConfig:
    return transformers.NemotronHConfig(
        **COMMON,
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        intermediate_size=96,
        mlp_bias=True,
        use_bias=True,
        ssm_state_size=16,
        mamba_num_heads=8,
        mamba_head_dim=12,
        n_groups=2,
        chunk_size=32,
        # transformers clamps the time step at this value in its chunked form only; 0 fails in a logarithm.
        time_step_min=1e-9,
        layer_norm_epsilon=1e-4,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=20,
        moe_shared_expert_intermediate_size=40,
        moe_latent_size=48,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
    )


def nemotron_h_dense() -> PretrainedConfig:
    """No experts, no latent space, no biases, a flag for tied embeddings, which the architecture does not follow; the
    layer kinds in their older spelling."""
    return transformers.NemotronHConfig(
        **COMMON,
        layers_block_type=["mamba", "attention", "mlp", "mamba", "mlp"],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=80,
        ssm_state_size=8,
        mamba_num_heads=6,
        mamba_head_dim=16,
        n_groups=3,
        conv_kernel=3,
        use_conv_bias=False,
        chunk_size=64,
        time_step_min=1e-9,
        tie_word_embeddings=True,
    )


def bamba() -> PretrainedConfig:
    """Half of each head is rotated, which the architecture fixes."""
    return transformers.BambaConfig(
        **COMMON,
        num_hidden_layers=4,
        attn_layer_indices=[1, 3],
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        attention_bias=True,
        mlp_bias=True,
        mamba_n_heads=8,
        mamba_n_groups=2,
        mamba_d_state=16,
        mamba_chunk_size=32,
        mamba_proj_bias=True,
        rms_norm_eps=1e-3,
        rope_theta=500.0,
    )


def granitemoehybrid() -> PretrainedConfig:
    """Experts, and attention without positions."""
    return transformers.GraniteMoeHybridConfig(
        **COMMON,
        layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
        intermediate_size=24,
        shared_intermediate_size=40,
        num_local_experts=6,
        num_experts_per_tok=3,
        embedding_multiplier=6.0,
        attention_multiplier=0.4,
        residual_multiplier=0.7,
        logits_scaling=3.0,
        mamba_n_heads=8,
        mamba_n_groups=2,
        mamba_d_state=16,
        mamba_chunk_size=32,
        mamba_proj_bias=True,
        rms_norm_eps=1e-3,
        position_embedding_type="nope",
    )


def granitemoehybrid_dense() -> PretrainedConfig:
    """No experts, rotary positions, no biases, tied embeddings; the layer types in their older spelling."""
    return transformers.GraniteMoeHybridConfig(
        **{**COMMON, "hidden_size": 48},
        layer_types=["mamba", "attention", "mamba"],
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        shared_intermediate_size=80,
        num_local_experts=0,
        embedding_multiplier=0.6,
        attention_multiplier=0.15,
        residual_multiplier=0.8,
        logits_scaling=0.3,
        mamba_n_heads=6,
        mamba_n_groups=3,
        mamba_d_state=8,
        mamba_d_conv=3,
        mamba_expand=1,
        mamba_chunk_size=64,
        mamba_conv_bias=False,
        rms_norm_eps=1e-3,
        position_embedding_type="rope",
        rope_theta=700.0,
        tie_word_embeddings=True,
    )


def gpt_oss() -> PretrainedConfig:
    """Sinks, windows shorter than the prompts in every other layer, experts with biases, a clamp that matters."""
    return transformers.GptOssConfig(
        **COMMON,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=20,
        intermediate_size=36,
        num_local_experts=6,
        num_experts_per_tok=3,
        sliding_window=21,
        swiglu_alpha=1.3,
        swiglu_limit=0.8,
        rms_norm_eps=1e-3,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 5000.0,
            "factor": 8.0,
            "beta_fast": 20.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    )


def granite_swa() -> PretrainedConfig:
    """Sinks, windows shorter than the prompts, a layer without positions and two rotary bases."""
    return transformers.GraniteSWAConfig(
        **{**COMMON, "hidden_size": 72},
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        intermediate_size=100,
        attention_bias=True,
        mlp_bias=True,
        sliding_window=21,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        layer_rope_theta=[700.0, 0, 30.0, 700.0],
        rope_parameters={"rope_type": "linear", "rope_theta": 900.0, "factor": 2.0},
        embedding_multiplier=6.0,
        attention_multiplier=0.4,
        residual_multiplier=0.7,
        logits_scaling=3.0,
        rms_norm_eps=1e-3,
        tie_word_embeddings=False,
    )


def granitemoe_swa() -> PretrainedConfig:
    """Experts and a shared MLP; windows and the one rotary base by their defaults."""
    return transformers.GraniteMoeSWAConfig(
        **COMMON,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=24,
        shared_intermediate_size=40,
        num_local_experts=6,
        num_experts_per_tok=3,
        sliding_window=40,
        rope_parameters={"rope_type": "default", "rope_theta": 700.0},
        embedding_multiplier=0.6,
        attention_multiplier=0.15,
        residual_multiplier=0.8,
        logits_scaling=0.3,
        rms_norm_eps=1e-3,
    )


def granitemoe_swa_alone() -> PretrainedConfig:
    """Experts without a shared MLP, no rotary embedding, tied embeddings, biases."""
    return transformers.GraniteMoeSWAConfig(
        **{**COMMON, "hidden_size": 48},
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=20,
        num_local_experts=5,
        num_experts_per_tok=2,
        attention_bias=True,
        sliding_window=17,
        layer_rope_theta=[0, 0],
        attention_multiplier=0.2,
        residual_multiplier=1.4,
        tie_word_embeddings=True,
    )


def olmo_hybrid() -> PretrainedConfig:
    """Beta up to 2. Queries, keys and values of a delta net have as many channels, for transformers saves their
    convolutions as thirds of one."""
    return transformers.OlmoHybridConfig(
        **COMMON,
        intermediate_size=96,
        num_hidden_layers=4,
        layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=24,
        linear_value_head_dim=8,
        linear_conv_kernel_dim=3,
        rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "default", "rope_theta": 700.0},
    )


def qwen3_5_text() -> PretrainedConfig:
    return transformers.Qwen3_5TextConfig(
        **COMMON,
        intermediate_size=96,
        num_hidden_layers=4,
        layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        attention_bias=True,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=16,
        linear_value_head_dim=24,
        linear_conv_kernel_dim=3,
        rms_norm_eps=1e-4,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
    )


def qwen3_5_moe_text() -> PretrainedConfig:
    config = qwen3_next()
    kept = {name: getattr(config, name) for name in DELTA_FIELDS}
    return transformers.Qwen3_5MoeTextConfig(**COMMON, **kept)


def kimi_linear() -> PretrainedConfig:
    """Experts of two groups of four are chosen; in latent attention values are of another width than keys; dense MLPs
    at both ends."""
    return transformers.KimiLinearConfig(
        **COMMON,
        intermediate_size=96,
        num_hidden_layers=4,
        layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
        mlp_layer_types=["dense", "sparse", "sparse", "dense"],
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=20,
        qk_rope_head_dim=6,
        qk_nope_head_dim=10,
        v_head_dim=14,
        num_local_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        moe_intermediate_size=20,
        n_shared_experts=2,
        routed_scaling_factor=2.5,
        linear_head_dim=12,
        linear_num_heads=6,
        linear_conv_kernel_dim=3,
        rms_norm_eps=1e-2,
    )


def bailing_hybrid() -> PretrainedConfig:
    """Decays that the bound changes; heads of another size than those of attention; a dense MLP at the beginning."""
    return transformers.BailingHybridConfig(
        **COMMON,
        intermediate_size=96,
        num_hidden_layers=4,
        layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
        mlp_layer_types=["dense", "sparse", "sparse", "dense"],
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=20,
        qk_rope_head_dim=6,
        qk_nope_head_dim=10,
        v_head_dim=14,
        num_local_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        moe_intermediate_size=20,
        n_shared_experts=2,
        routed_scaling_factor=1.7,
        head_dim=12,
        short_conv_kernel_size=3,
        kda_lower_bound=-2.5,
        num_mtp_layers=0,
        rms_norm_eps=1e-2,
        rope_parameters={"rope_type": "default", "rope_theta": 700.0},
    )


DELTA_FIELDS = (
    "num_hidden_layers",
    "layer_types",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "rms_norm_eps",
    "rope_parameters",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)


def qwen3_next() -> PretrainedConfig:
    return transformers.Qwen3NextConfig(
        **COMMON,
        intermediate_size=72,
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=16,
        linear_value_head_dim=24,
        linear_conv_kernel_dim=3,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=40,
        norm_topk_prob=False,
        mlp_only_layers=[1],
        rms_norm_eps=1e-4,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
    )


def glm5_next() -> PretrainedConfig:
    """Decays and activations that their bounds change, a layer that shares a choice of blocks, groups of experts."""
    attention, linear = "indexed_attention", "linear_attention"
    text = COMMON | {
        "intermediate_size": 96,
        "num_hidden_layers": 5,
        "layer_types": [linear, attention, attention, linear, attention],
        "indexer_types": ["shared", "full", "shared", "full", "full"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse", "dense"],
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "attention_bias": True,
        "q_lora_rank": 28,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 10,
        "v_head_dim": 14,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 20,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.7,
        "swiglu_limit": 0.8,
        "index_n_heads": 13,  # so that hardly any block has the score 0, which equals any other of it
        "index_head_dim": 18,
        "index_topk": 12,
        "index_kpool": 3,
        "linear_head_dim": 12,
        "linear_num_heads": 6,
        "linear_conv_kernel_dim": 3,
        "linear_lower_bound": -2.5,
        "hc_mult": 3,
        "hc_eps": 1e-2,
        "hc_sinkhorn_iters": 4,
        "rms_norm_eps": 1e-2,
    }
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4}
    return transformers.AutoConfig.for_model(
        "glm5_next",
        text_config=text,
        vision_config=vision | {"out_hidden_size": 64, "projection_intermediate_size": 40},
        image_token_id=6,
        video_token_id=7,
        image_start_token_id=8,
        image_end_token_id=9,
        video_start_token_id=10,
        video_end_token_id=11,
    )


def qwen4_exp() -> PretrainedConfig:
    """The text part of a checkpoint that has an encoder of images too."""
    kinds = ["linear_attention", "full_attention"]
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4}
    return transformers.AutoConfig.for_model(
        "qwen4_exp",
        text_config=qwen4_exp_text().to_dict() | {"ple_layer_ids": [1], "num_hidden_layers": 2, "layer_types": kinds},
        vision_config=vision | {"out_hidden_size": 64, "num_position_embeddings": 16},
        image_token_id=6,
        video_token_id=7,
        vision_start_token_id=8,
        vision_end_token_id=9,
    )


def qwen4_exp_text() -> PretrainedConfig:
    """Two layers with n-grams, whose hashes differ; prompts contain the token that ends their texts."""
    return transformers.AutoConfig.for_model(
        "qwen4_exp_text",
        **COMMON | {"eos_token_id": [5, EOS]},
        num_hidden_layers=4,
        layer_types=["linear_attention", "indexed_attention", "linear_attention", "indexed_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        attention_bias=True,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=16,
        linear_value_head_dim=24,
        linear_conv_kernel_dim=3,
        output_gate_type="sigmoid",
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=40,
        norm_topk_prob=False,
        hc_count=3,
        hc_lowrank=20,
        ple_layer_ids=[3, 1],
        ple_embed_dim=60,
        ple_conv_kernel_size=3,
        ngram_size=4,
        heads_per_ngram=2,
        ngram_vocab_size_base=50,
        make_ngram_vocab_size_divisible_by=16,
        seed=77,
        split_ngram_parts=5,
        indexer_n_heads=11,  # so that hardly any block has the score 0, which equals any other of it
        indexer_kv_heads=1,
        indexer_head_dim=20,
        indexer_budget=12,
        indexer_compress_ratio=3,
        rms_norm_eps=1e-4,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
    )


def qwen3() -> PretrainedConfig:
    return transformers.Qwen3Config(
        **COMMON,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        attention_bias=True,
        rms_norm_eps=1e-3,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 3000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    )


def granite() -> PretrainedConfig:
    return transformers.GraniteConfig(
        **COMMON,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
        mlp_bias=True,
        embedding_multiplier=6.0,
        attention_multiplier=0.4,
        residual_multiplier=0.7,
        logits_scaling=3.0,
        rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "default", "rope_theta": 700.0},
    )


def granitemoe() -> PretrainedConfig:
    """Experts alone, tied embeddings."""
    return transformers.GraniteMoeConfig(
        **COMMON,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
        num_local_experts=6,
        num_experts_per_tok=3,
        embedding_multiplier=0.6,
        attention_multiplier=0.15,
        residual_multiplier=0.8,
        logits_scaling=0.3,
        rms_norm_eps=1e-3,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 700.0},
    )


def ernie4_5() -> PretrainedConfig:
    """Biases everywhere; the rows that positions rotate together are neighbours."""
    return transformers.Ernie4_5Config(
        **COMMON,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        use_bias=True,
        rms_norm_eps=1e-3,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 700.0},
    )


def seed_oss() -> PretrainedConfig:
    """Biases of all projections but the output's of attention."""
    return transformers.SeedOssConfig(
        **COMMON,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        attention_bias=True,
        attention_out_bias=False,
        mlp_bias=True,
        rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "linear", "rope_theta": 700.0, "factor": 3.0},
    )


def qwen3_moe() -> PretrainedConfig:
    """Weights of experts that do not add up to 1, an MLP in the second layer, biases, tied embeddings."""
    return transformers.Qwen3MoeConfig(
        **COMMON,
        intermediate_size=96,
        num_hidden_layers=3,
        mlp_only_layers=[1],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        attention_bias=True,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=20,
        norm_topk_prob=False,
        rms_norm_eps=1e-3,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 700.0},
    )


def mixtral() -> PretrainedConfig:
    """Experts and a window in every layer; no biases, embeddings apart."""
    return transformers.MixtralConfig(
        **COMMON,
        intermediate_size=36,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        num_local_experts=5,
        num_experts_per_tok=2,
        sliding_window=45,
        rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "default", "rope_theta": 20000.0},
    )


def youtu() -> PretrainedConfig:
    """Queries out of a latent of their own; pairs that positions rotate are neighbours."""
    return transformers.YoutuConfig(
        **COMMON,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=28,
        kv_lora_rank=24,
        qk_rope_head_dim=6,
        qk_nope_head_dim=10,
        v_head_dim=14,
        rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "default", "rope_theta": 700.0},
    )


def youtu_plain() -> PretrainedConfig:
    """Queries without a latent, and untied embeddings; pairs that positions rotate are half a head apart."""
    config = youtu()
    config.q_lora_rank, config.rope_interleave, config.tie_word_embeddings = None, False, False
    return config


def gemma2() -> PretrainedConfig:
    """Capped scores and logits, both reached; a window shorter than the prompts in every other layer."""
    return transformers.Gemma2Config(
        **COMMON,
        intermediate_size=96,
        num_hidden_layers=3,
        sliding_window=40,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        attention_bias=True,
        query_pre_attn_scalar=3,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=5.0,
        rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "default", "rope_theta": 700.0},
    )


def gemma3_text() -> PretrainedConfig:
    """Layers with a window shorter than the prompts, and one that sees all, each kind with its rotary embedding."""
    return transformers.Gemma3TextConfig(
        **COMMON,
        intermediate_size=96,
        num_hidden_layers=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        sliding_window=40,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        attention_bias=True,
        query_pre_attn_scalar=50,
        rms_norm_eps=1e-3,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 20000.0, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    )


def gemma4_text() -> PretrainedConfig:
    """Larger heads without a window, whose values are their keys; small embeddings; two layers read others' keys."""
    return transformers.Gemma4TextConfig(
        **COMMON,
        intermediate_size=96,
        num_hidden_layers=5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        sliding_window=40,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        global_head_dim=20,
        attention_k_eq_v=True,
        num_global_key_value_heads=4,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=12,
        vocab_size_per_layer_input=VOCAB_SIZE,
        final_logit_softcapping=5.0,
        rms_norm_eps=1e-3,
        rope_parameters={
            "full_attention": {"rope_type": "proportional", "rope_theta": 3000.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    )


def gemma4() -> PretrainedConfig:
    """The text part of a checkpoint that may have encoders too, with experts beside the MLPs and biases."""
    text = gemma4_text().to_dict() | {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
    text |= {"attention_bias": True, "attention_k_eq_v": False, "final_logit_softcapping": None}
    text |= {"tie_word_embeddings": False, "global_head_dim": 16, "num_hidden_layers": 3}
    text |= {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "enable_moe_block": True}
    text |= {"num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 40}
    text.pop("per_layer_config")
    return transformers.Gemma4Config(text_config=text, tie_word_embeddings=False)


def gemma4_unified_text() -> PretrainedConfig:
    """Wide MLPs in layers that read others' keys, and values that are keys; neither small embeddings nor experts."""
    text = gemma4_text().to_dict() | {"num_kv_shared_layers": 2, "tie_word_embeddings": False, "sliding_window": 37}
    return transformers.Gemma4UnifiedTextConfig(**without_small_embeddings(text))


def gemma4_unified() -> PretrainedConfig:
    """The text part of a checkpoint that may take images too, with biases, and values apart from keys."""
    text = gemma4().text_config.to_dict()
    return transformers.Gemma4UnifiedConfig(text_config=without_small_embeddings(text), tie_word_embeddings=True)


def without_small_embeddings(text: dict[str, Any]) -> dict[str, Any]:
    """Values of Gemma 4's text without those that Gemma 4 Unified does not have."""
    foreign = ("model_type", "per_layer_input", "experts", "moe")
    return {name: value for name, value in text.items() if not any(word in name for word in foreign)}


def olmo3() -> PretrainedConfig:
    """Norms behind attention and MLP; a window in two layers of three, whose positions are not scaled."""
    return transformers.Olmo3Config(
        **COMMON,
        intermediate_size=96,
        num_hidden_layers=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        sliding_window=33,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
        rms_norm_eps=1e-3,
        tie_word_embeddings=True,
        rope_parameters={
            "full_attention": {"rope_type": "yarn", "rope_theta": 3000.0, "factor": 4.0}
            | {"original_max_position_embeddings": 64},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    )


def exaone4() -> PretrainedConfig:
    """Norms behind attention and MLP; the layer without a window has no positions."""
    return transformers.Exaone4Config(
        **COMMON,
        intermediate_size=96,
        num_hidden_layers=3,
        sliding_window=29,
        sliding_window_pattern=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "default", "rope_theta": 700.0},
    )


def mellum() -> PretrainedConfig:
    """Experts in two layers of three; layers with a window and their rotary embedding."""
    return transformers.MellumConfig(
        **COMMON,
        intermediate_size=96,
        num_hidden_layers=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        mlp_layer_types=["sparse", "sparse", "dense"],
        sliding_window=41,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        attention_bias=True,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=20,
        rms_norm_eps=1e-3,
        tie_word_embeddings=True,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 20000.0, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    )


def phi3() -> PretrainedConfig:
    """Three quarters of a head are rotated; a window in every layer."""
    return transformers.Phi3Config(
        **COMMON,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=43,
        original_max_position_embeddings=512,
        rms_norm_eps=1e-3,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 0.75},
    )


def ministral3() -> PretrainedConfig:
    """Queries grow every 48 tokens."""
    return transformers.Ministral3Config(
        **COMMON,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        rms_norm_eps=1e-3,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 3000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 48,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.4,
        },
    )


def cohere2() -> PretrainedConfig:
    """Attention beside the MLP; the second layer has neither a window nor positions."""
    return transformers.Cohere2Config(
        **COMMON,
        intermediate_size=96,
        num_hidden_layers=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        sliding_window=35,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
        layer_norm_eps=1e-3,
        logit_scale=0.3,
        rope_parameters={"rope_type": "default", "rope_theta": 700.0},
    )


def qwen2() -> PretrainedConfig:
    """Biases of queries, keys and values alone, which the architecture fixes. The second layer has a window."""
    return transformers.Qwen2Config(
        **COMMON,
        use_sliding_window=True,
        sliding_window=48,
        max_window_layers=1,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "default", "rope_theta": 700.0},
    )


def mistral() -> PretrainedConfig:
    """A window in every layer, shorter than the prompts."""
    return transformers.MistralConfig(
        **COMMON,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        sliding_window=37,
        rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "default", "rope_theta": 20000.0},
    )


def smollm3() -> PretrainedConfig:
    """Every third layer without positions."""
    return transformers.SmolLM3Config(
        **COMMON,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
        mlp_bias=True,
        no_rope_layer_interval=3,
        rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "default", "rope_theta": 700.0},
    )


def lfm2() -> PretrainedConfig:
    """Short convolutions with biases, and an MLP whose size is adjusted."""
    return transformers.Lfm2Config(
        **COMMON,
        layer_types=["conv", "full_attention", "conv", "conv", "full_attention"],
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        conv_bias=True,
        conv_L_cache=4,
        intermediate_size=130,
        block_multiple_of=24,
        block_ffn_dim_multiplier=1.1,
        norm_eps=1e-3,
        rope_parameters={"rope_type": "default", "rope_theta": 700.0},
        tie_word_embeddings=False,
    )


def lfm2_moe() -> PretrainedConfig:
    """Experts behind the first layer, chosen with a bias."""
    return transformers.Lfm2MoeConfig(
        **COMMON,
        layer_types=["conv", "full_attention", "conv", "conv"],
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        moe_intermediate_size=20,
        num_dense_layers=1,
        num_experts=6,
        num_experts_per_tok=3,
        routed_scaling_factor=2.5,
        norm_eps=1e-3,
        rope_parameters={"rope_type": "default", "rope_theta": 700.0},
        tie_word_embeddings=True,
    )


def lfm3() -> PretrainedConfig:
    """Windows shorter than the prompts, half of the angles of attention without a window, every bias and norm."""
    return transformers.Lfm3Config(
        **COMMON,
        layer_types=["conv", "sliding_attention", "conv", "full_attention", "sliding_attention"],
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=20,
        sliding_window=37,
        intermediate_size=90,
        conv_L_cache=7,
        conv_bias=True,
        attention_bias=True,
        norm_eps=1e-3,
        rope_parameters={
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 700.0,
                "partial_rotary_factor": 0.65,
                "factor": 1.5,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
        },
        tie_word_embeddings=False,
    )


def lfm3_plain() -> PretrainedConfig:
    """No gate, no second norm, no bias; tied embeddings, and a convolution of other taps."""
    return transformers.Lfm3Config(
        **{**COMMON, "hidden_size": 48},
        layer_types=["conv", "full_attention", "conv"],
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=24,
        intermediate_size=72,
        conv_L_cache=5,
        use_sandwich_norm=False,
        use_attention_gate=False,
        norm_eps=1e-2,
    )


def mamba2() -> PretrainedConfig:
    """Layers of state alone."""
    config = {name: value for name, value in COMMON.items() if name != "max_position_embeddings"}
    return transformers.Mamba2Config(
        **config,
        num_hidden_layers=4,
        num_heads=8,
        head_dim=24,
        expand=3,
        state_size=16,
        n_groups=2,
        conv_kernel=3,
        use_bias=True,
        chunk_size=32,
        layer_norm_epsilon=1e-3,
        tie_word_embeddings=True,
    )


def mamba() -> PretrainedConfig:
    """Layers of state alone, with a decay for each of its elements; no biases, tied embeddings."""
    config = {name: value for name, value in COMMON.items() if name != "max_position_embeddings"}
    return transformers.MambaConfig(
        **config,
        num_hidden_layers=3,
        state_size=8,
        conv_kernel=3,
        expand=3,
        use_conv_bias=False,
        time_step_rank=5,
        layer_norm_epsilon=1e-3,
    )


def falcon_mamba() -> PretrainedConfig:
    """Norms without weights in the mixer; the inner size in its own key, beside an `expand` of another one."""
    config = {name: value for name, value in COMMON.items() if name != "max_position_embeddings"}
    return transformers.FalconMambaConfig(
        **config,
        num_hidden_layers=3,
        expand=16,
        intermediate_size=72,
        use_bias=True,
        layer_norm_epsilon=1e-3,
        mixer_rms_eps=1e-2,
        tie_word_embeddings=False,
    )


def hrm_text() -> PretrainedConfig:
    """Two layers in each stack, of which L runs four times and H twice; a prompt that is causal."""
    return transformers.HrmTextConfig(
        **COMMON,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=24,
        attention_bias=True,
        mlp_bias=True,
        rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "default", "rope_theta": 700.0},
        H_cycles=2,
        L_cycles=2,
        embedding_scale=1.7,
        prefix_lm=False,
    )


def jamba() -> PretrainedConfig:
    """Mixers and attention without positions; experts weighed by a softmax over all of them, or an MLP."""
    return transformers.JambaConfig(
        **COMMON,
        num_hidden_layers=5,
        attn_layer_period=3,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=40,
        num_experts=6,
        num_experts_per_tok=3,
        mamba_d_state=8,
        mamba_d_conv=3,
        mamba_proj_bias=True,
        rms_norm_eps=1e-2,
    )


def falcon_h1() -> PretrainedConfig:
    """No norm in the mixer, and a bias on its input projection only."""
    return transformers.FalconH1Config(
        **COMMON,
        **FALCON_MULTIPLIERS,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        attention_bias=True,
        mlp_bias=True,
        mamba_d_ssm=96,
        mamba_n_heads=8,
        mamba_d_head=12,
        mamba_n_groups=2,
        mamba_d_state=16,
        mamba_chunk_size=32,
        mamba_proj_bias=True,
        rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "default", "rope_theta": 700.0},
    )


def falcon_h1_normed() -> PretrainedConfig:
    """A norm before the gate, a bias on the output projection only, the inner size from the hidden one."""
    return transformers.FalconH1Config(
        **COMMON,
        **FALCON_MULTIPLIERS,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        mamba_d_ssm=None,
        mamba_expand=3,
        mamba_n_heads=6,
        mamba_n_groups=3,
        mamba_d_state=8,
        mamba_d_conv=3,
        mamba_chunk_size=48,
        mamba_conv_bias=False,
        mamba_rms_norm=True,
        mamba_norm_before_gate=True,
        projectors_bias=True,
        rms_norm_eps=1e-2,
        rope_parameters={"rope_type": "linear", "rope_theta": 900.0, "factor": 3.0},
        tie_word_embeddings=True,
    )


def zamba2() -> PretrainedConfig:
    """Two blocks, of which the first is used twice and the second once; adapters everywhere."""
    return transformers.Zamba2Config(
        **COMMON,
        layers_block_type=["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid"],
        num_hidden_layers=5,
        num_mem_blocks=2,
        num_attention_heads=4,
        intermediate_size=96,
        hidden_act="gelu",
        add_bias_linear=True,
        use_shared_attention_adapter=True,
        adapter_rank=20,
        use_mem_rope=True,
        rope_parameters={"rope_type": "default", "rope_theta": 700.0},
        n_mamba_heads=8,
        mamba_ngroups=2,
        mamba_d_state=8,
        mamba_d_conv=3,
        chunk_size=32,
        # As for nemotron_h.
        time_step_min=1e-9,
        rms_norm_eps=1e-3,
    )


RECIPES: dict[str, Callable[[], PretrainedConfig]] = {
    recipe.__name__: recipe
    for recipe in (
        arcee,
        bailing_hybrid,
        bamba,
        cohere2,
        ernie4_5,
        exaone4,
        falcon_h1,
        falcon_h1_normed,
        falcon_mamba,
        gemma2,
        gemma3_text,
        gemma4,
        gemma4_text,
        gemma4_unified,
        gemma4_unified_text,
        glm5_next,
        gpt_oss,
        granite,
        granite_swa,
        granitemoe,
        granitemoe_swa,
        granitemoe_swa_alone,
        granitemoehybrid,
        granitemoehybrid_dense,
        hrm_text,
        jamba,
        kimi_linear,
        lfm2,
        lfm2_moe,
        lfm3,
        lfm3_plain,
        llama,
        mamba,
        mamba2,
        mellum,
        ministral3,
        mistral,
        mixtral,
        nemotron_h,
        nemotron_h_dense,
        olmo3,
        olmo_hybrid,
        phi3,
        qwen2,
        qwen3,
        qwen3_5_moe_text,
        qwen3_5_text,
        qwen3_moe,
        qwen3_next,
        qwen4_exp,
        qwen4_exp_text,
        seed_oss,
        smollm3,
        youtu,
        youtu_plain,
        zamba2,
    )
}


IN_REFERENCES = {"glm5_next"}
"""Architectures with operations that have no native kernel, so that `deterministic` refuses them."""


def nemotron_h_head() -> PretrainedConfig:
    """A prediction head of attention and experts."""
    config = nemotron_h()
    config.num_nextn_predict_layers, config.mtp_layers_block_type = 1, ["full_attention", "moe"]
    return config


def nemotron_h_dense_head() -> PretrainedConfig:
    """A prediction head of attention and an MLP."""
    return _dense_with_head(["mamba", "attention", "mlp", "mamba", "mlp"], ["attention", "mlp"])


def nemotron_h_deep_head() -> PretrainedConfig:
    """The head alone has attention, twice, and begins and ends without it."""
    return _dense_with_head(["mamba", "mlp"], ["mlp", "attention", "attention", "mlp"])


def nemotron_h_stateless_head() -> PretrainedConfig:
    """No recurrent state but the hidden state that the head needs."""
    return _dense_with_head(["attention", "mlp", "attention"], ["attention"])


def nemotron_h_flat_head() -> PretrainedConfig:
    """No attention, neither in the model nor in the head."""
    return _dense_with_head(["mamba", "mlp", "mamba"], ["mlp"])


def qwen3_5_text_head() -> PretrainedConfig:
    """A prediction head of attention and an MLP; the model's embedding, tied to its LM head, is the head's too."""
    config = qwen3_5_text()
    config.mtp_num_hidden_layers = 1
    return config


def qwen3_next_head() -> PretrainedConfig:
    """A prediction head of attention and experts."""
    config = qwen3_next()
    config.num_nextn_predict_layers = 1
    return config


def bailing_hybrid_head() -> PretrainedConfig:
    """A prediction head of gated latent attention and experts, whose tensors are those of one more layer."""
    config = bailing_hybrid()
    config.num_mtp_layers = 1
    return config


def _dense_with_head(kinds: list[str], head_kinds: list[str]) -> PretrainedConfig:
    given = nemotron_h_dense().to_dict() | {
        "layers_block_type": kinds,
        "num_hidden_layers": len(kinds),
        "num_nextn_predict_layers": 1,
        "mtp_layers_block_type": head_kinds,
    }
    return transformers.NemotronHConfig(**given)


HEADED: dict[str, Callable[[], PretrainedConfig]] = {
    recipe.__name__: recipe
    for recipe in (
        nemotron_h_head,
        nemotron_h_dense_head,
        nemotron_h_deep_head,
        nemotron_h_stateless_head,
        nemotron_h_flat_head,
        qwen3_5_text_head,
        qwen3_next_head,
        bailing_hybrid_head,
    )
}
"""Models with a prediction head."""


def hrm_text_prefix() -> PretrainedConfig:
    """The same model with prompts whose tokens see each other."""
    config = hrm_text()
    config.prefix_lm = True
    return config


PREFIX_LMS: dict[str, Callable[[], PretrainedConfig]] = {"hrm_text_prefix": hrm_text_prefix}
"""Models whose prompts are computed whole."""
