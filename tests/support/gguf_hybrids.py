"""What llama.cpp's converter makes of the tensors of hybrid models, by its rules: names and values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np
import transformers

from tests.support.gguf_heads import NAMES as OF_HEADS
from tests.support.gguf_heads import head_layers

COMMON = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}
HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0, "partial_rotary_factor": 0.5}}
MIXER = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
    "mamba_expand": 2,
}
NEMOTRON = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "chunk_size": 16,
    "head_dim": 32,
    "layer_norm_epsilon": 1e-3,
}
SELECTIVE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "state_size": 16,
    "conv_kernel": 4,
    "time_step_rank": 32,
    "layer_norm_epsilon": 1e-3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
JAMBA = COMMON | {
    "num_hidden_layers": 5,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "mamba_d_state": 16,
    "mamba_dt_rank": 32,
}
GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
}
FALCON = {
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.5,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.6,
    "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
    "mlp_multipliers": [0.9, 0.8],
}
_GRANITE4 = {
    **COMMON,
    **GRANITE,
    **MIXER,
    "num_hidden_layers": 3,
    "shared_intermediate_size": 128,
    "layer_types": ["mamba", "attention", "mamba"],
    "position_embedding_type": "nope",
}
DELTA_NET = {
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
SHARED_KEYS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
"""A head is a whole block, so that blocks may be made before heads change places."""
_QWEN35 = {
    **COMMON,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 32,
    "rope_parameters": {**HALF["rope_parameters"], "mrope_section": [4, 2, 2], "mrope_interleaved": True},
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96,
}
_HEAD = {"mtp_num_hidden_layers": 1}
_GRANITE_SWA = {**COMMON, **GRANITE, **ROPE, "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
_GRANITE_SWA |= {"sliding_window": 12}
HYBRIDS: dict[str, tuple[str, Any]] = {
    "qwen3moe of experts": (
        "qwen3moe",
        lambda: transformers.Qwen3MoeConfig(
            **COMMON,
            **ROPE,
            num_hidden_layers=2,
            head_dim=32,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            norm_topk_prob=True,
        ),
    ),
    "granitemoe of experts": (
        "granitemoe",
        lambda: transformers.GraniteMoeConfig(
            **COMMON, **GRANITE, **ROPE, num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2
        ),
    ),
    "ernie4_5": ("ernie4_5", lambda: transformers.Ernie4_5Config(**COMMON, **ROPE, num_hidden_layers=2, head_dim=32)),
    "seed_oss": ("seed_oss", lambda: transformers.SeedOssConfig(**COMMON, **ROPE, num_hidden_layers=2, head_dim=32)),
    "smollm3": ("smollm3", lambda: transformers.SmolLM3Config(**COMMON, **ROPE, num_hidden_layers=5)),
    "arcee": ("arcee", lambda: transformers.ArceeConfig(**COMMON, **ROPE, num_hidden_layers=2)),
    "cohere2": (
        "cohere2",
        lambda: transformers.Cohere2Config(
            **{name: value for name, value in COMMON.items() if name != "rms_norm_eps"},
            **ROPE,
            num_hidden_layers=4,
            sliding_window=12,
            layer_norm_eps=1e-3,
            logit_scale=0.25,
        ),
    ),
    "ministral3": (
        "mistral3",
        lambda: transformers.Ministral3Config(
            **COMMON,
            num_hidden_layers=2,
            head_dim=32,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 20000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.5,
            },
        ),
    ),
    "phi3": (
        "phi3",
        lambda: transformers.Phi3Config(
            **COMMON,
            num_hidden_layers=2,
            sliding_window=30,
            original_max_position_embeddings=32,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 20000.0,
                "partial_rotary_factor": 0.5,
                "original_max_position_embeddings": 32,
                "short_factor": [1.0, 1.25, 1.5, 2.0],
                "long_factor": [1.0, 2.0, 4.0, 8.0],
            },
        ),
    ),
    "exaone4": (
        "exaone4",
        lambda: transformers.Exaone4Config(
            **COMMON, **ROPE, num_hidden_layers=3, head_dim=32, sliding_window=12, sliding_window_pattern=2
        ),
    ),
    "olmo3": (
        "olmo2",
        lambda: transformers.Olmo3Config(
            **COMMON,
            num_hidden_layers=2,
            sliding_window=12,
            layer_types=["full_attention", "sliding_attention"],
            rope_parameters={
                "full_attention": {"rope_type": "yarn", "rope_theta": 20000.0, "factor": 4.0}
                | {"original_max_position_embeddings": 128},
                "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
            },
        ),
    ),
    "mixtral of experts": (
        "llama",
        lambda: transformers.MixtralConfig(
            **COMMON, **ROPE, num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2
        ),
    ),
    "granite": ("granite", lambda: transformers.GraniteConfig(**COMMON, **GRANITE, **ROPE, num_hidden_layers=2)),
    "granite_swa": (
        "granite_swa",
        lambda: transformers.GraniteSWAConfig(
            **COMMON,
            **GRANITE,
            **ROPE,
            num_hidden_layers=3,
            sliding_window=12,
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
            layer_rope_theta=[20000.0, 0, 20000.0],
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
        ),
    ),
    "granite_swa of experts": (
        "granite_swa",
        lambda: transformers.GraniteMoeSWAConfig(**_GRANITE_SWA, shared_intermediate_size=64),
    ),
    "granite_swa with experts alone, of experts": (
        "granite_swa",
        lambda: transformers.GraniteMoeSWAConfig(**_GRANITE_SWA),
    ),
    "granitehybrid": (
        "granitehybrid",
        lambda: transformers.GraniteMoeHybridConfig(**_GRANITE4, num_local_experts=0),
    ),
    "granitehybrid of experts": (
        "granitehybrid",
        lambda: transformers.GraniteMoeHybridConfig(**_GRANITE4, num_local_experts=4, num_experts_per_tok=2),
    ),
    "bamba": (
        "granitehybrid",
        lambda: transformers.BambaConfig(**COMMON, **MIXER, **HALF, num_hidden_layers=3, attn_layer_indices=[1]),
    ),
    "falcon-h1": (
        "falcon-h1",
        lambda: transformers.FalconH1Config(
            **COMMON,
            **MIXER,
            **ROPE,
            **FALCON,
            num_hidden_layers=2,
            head_dim=32,
            mamba_d_ssm=128,
            mamba_rms_norm=True,
            mamba_norm_before_gate=False,
        ),
    ),
    "nemotron_h": (
        "nemotron_h",
        lambda: transformers.NemotronHConfig(
            **COMMON, **NEMOTRON, num_hidden_layers=3, layers_block_type=["mamba", "attention", "mlp"]
        ),
    ),
    "nemotron_h of experts": (
        "nemotron_h_moe",
        lambda: transformers.NemotronHConfig(
            **COMMON,
            **NEMOTRON,
            num_hidden_layers=3,
            layers_block_type=["mamba", "attention", "moe"],
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            moe_shared_expert_intermediate_size=96,
            routed_scaling_factor=1.5,
        ),
    ),
    "lfm2": (
        "lfm2",
        lambda: transformers.Lfm2Config(
            **COMMON,
            **ROPE,
            num_hidden_layers=3,
            layer_types=["conv", "full_attention", "conv"],
            norm_eps=1e-3,
            block_auto_adjust_ff_dim=False,
            tie_word_embeddings=True,
        ),
    ),
    "lfm2moe of experts": (
        "lfm2moe",
        lambda: transformers.Lfm2MoeConfig(
            **COMMON,
            **ROPE,
            num_hidden_layers=3,
            layer_types=["conv", "full_attention", "conv"],
            norm_eps=1e-3,
            num_dense_layers=1,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            tie_word_embeddings=True,
        ),
    ),
    "qwen35": ("qwen35", lambda: transformers.Qwen3_5TextConfig(**_QWEN35, **DELTA_NET)),
    "qwen35 with shared keys": ("qwen35", lambda: transformers.Qwen3_5TextConfig(**_QWEN35, **SHARED_KEYS)),
    "qwen35moe of experts": (
        "qwen35moe",
        lambda: transformers.Qwen3_5MoeTextConfig(**_QWEN35, **SHARED_KEYS, **_EXPERTS),
    ),
    "qwen3next of experts": (
        "qwen3next",
        lambda: transformers.Qwen3NextConfig(**{**_QWEN35, **HALF}, **SHARED_KEYS, **_EXPERTS),
    ),
    "qwen35 with a head": ("qwen35", lambda: transformers.Qwen3_5TextConfig(**_QWEN35, **SHARED_KEYS, **_HEAD)),
    "qwen35moe with a head, of experts": (
        "qwen35moe",
        lambda: transformers.Qwen3_5MoeTextConfig(**_QWEN35, **SHARED_KEYS, **_EXPERTS, **_HEAD),
    ),
    "qwen3next with a head, of experts": (
        "qwen3next",
        lambda: transformers.Qwen3NextConfig(**{**_QWEN35, **HALF}, **SHARED_KEYS, **_EXPERTS, **_HEAD),
    ),
    "mamba2": (
        "mamba2",
        lambda: transformers.Mamba2Config(
            vocab_size=320,
            hidden_size=64,
            num_hidden_layers=2,
            num_heads=8,
            head_dim=16,
            state_size=16,
            n_groups=2,
            chunk_size=16,
            layer_norm_epsilon=1e-3,
            expand=2,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=0,
        ),
    ),
    "mamba": (
        "mamba",
        lambda: transformers.MambaConfig(**SELECTIVE, use_conv_bias=False, tie_word_embeddings=True),
    ),
    "mamba of Falcon": (
        "mamba",
        lambda: transformers.FalconMambaConfig(
            **SELECTIVE, intermediate_size=128, use_bias=True, tie_word_embeddings=False
        ),
    ),
    "kimi-linear of experts": (
        "kimi-linear",
        lambda: transformers.KimiLinearConfig(
            **COMMON
            | {"num_key_value_heads": 4, "num_hidden_layers": 4, "pad_token_id": None}
            | {"layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"]}
            | {"mlp_layer_types": ["dense", "sparse", "sparse", "dense"], "kv_lora_rank": 32, "v_head_dim": 16}
            | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 24, "linear_head_dim": 32, "linear_num_heads": 4}
            | {"num_local_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2}
            | {"moe_intermediate_size": 32, "n_shared_experts": 2, "routed_scaling_factor": 2.5},
        ),
    ),
    "jamba of experts": (
        "jamba",
        lambda: transformers.JambaConfig(**JAMBA, num_experts=4, num_experts_per_tok=2, tie_word_embeddings=False),
    ),
    "jamba": (
        "jamba",
        lambda: transformers.JambaConfig(**JAMBA, num_experts=1, mamba_proj_bias=True, tie_word_embeddings=True),
    ),
}
"""Name -> the architecture that the file says, and a config."""
MAMBA1 = ("mamba", "falcon_mamba", "jamba")
"""Model types whose time steps have a projection, and whose A has a column for each state."""
DENSE = (
    *("cohere2", "ernie4_5", "exaone4", "granite", "granitemoe", "ministral3", "mixtral", "olmo3", "phi3", "qwen3_moe"),
    *("seed_oss", "granite_swa", "granitemoe_swa", "smollm3", "arcee"),
)
"""Model types without state layers, whose metadata are those of Llama."""
AS_THEY_ARE = ("cohere2", "ernie4_5", "exaone4", "olmo3", "phi3", "qwen3_moe", "seed_oss")
"""Those of them whose rows of queries and keys a file has in the order of a checkpoint."""
OUTSIDE = {
    "embed_tokens": "token_embd",
    "embeddings": "token_embd",
    "norm": "output_norm",
    "norm_f": "output_norm",
    "embedding_norm": "token_embd_norm",
    "final_layernorm": "output_norm",
    "lm_head": "output",
}
NAMES = {
    "input_layernorm": "attn_norm",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "norm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "pre_ff_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    **{f"{mixer}.{part}_proj": f"attn_{part}" for mixer in ("self_attn", "mixer") for part in "qkv"},
    **{f"{mixer}.o_proj": "attn_output" for mixer in ("self_attn", "mixer")},
    **{f"{mlp}.{part}_proj": f"ffn_{part}" for mlp in ("mlp", "feed_forward", "mixer") for part in ("gate", "up")},
    **{f"{mlp}.down_proj": "ffn_down" for mlp in ("mlp", "feed_forward", "mixer")},
    **{f"{mixer}.in_proj": "ssm_in" for mixer in ("mamba", "mixer")},
    **{f"{mixer}.out_proj": "ssm_out" for mixer in ("mamba", "mixer")},
    **{f"{mixer}.conv1d": "ssm_conv1d" for mixer in ("mamba", "mixer")},
    **{f"{mixer}.norm": "ssm_norm" for mixer in ("mamba", "mixer")},
    **{f"{mixer}.A_log": "ssm_a" for mixer in ("mamba", "mixer")},
    **{f"{mixer}.D": "ssm_d" for mixer in ("mamba", "mixer")},
    **{f"{mixer}.dt_bias": "ssm_dt.bias" for mixer in ("mamba", "mixer")},
    **{f"{mixer}.x_proj": "ssm_x" for mixer in ("mamba", "mixer")},
    **{f"{mixer}.dt_proj": "ssm_dt" for mixer in ("mamba", "mixer")},
    **{f"mamba.{part}_layernorm": f"ssm_{part}_norm" for part in ("dt", "b", "c")},
    "feed_forward.router": "ffn_gate_inp",
    "self_attn.out_proj": "attn_output",
    **{f"self_attn.{part}_{norm}": f"attn_{part}_norm" for part in "qk" for norm in ("norm", "layernorm")},
    **{f"conv.{part}": f"shortconv.{part}" for part in ("in_proj", "conv", "out_proj")},
    **{f"feed_forward.w{i}": f"ffn_{part}" for i, part in ((1, "gate"), (3, "up"), (2, "down"))},
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "self_attn.sinks": "attn_sinks.weight",
    "block_sparse_moe.router": "ffn_gate_inp",
    "block_sparse_moe.experts.down_proj": "ffn_down_exps.weight",
    "mixer.gate": "ffn_gate_inp",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.experts.up_proj": "ffn_up_exps.weight",
    "mixer.experts.down_proj": "ffn_down_exps.weight",
    "mixer.shared_experts.up_proj": "ffn_up_shexp",
    "mixer.shared_experts.down_proj": "ffn_down_shexp",
    "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    "feed_forward.experts.down_proj": "ffn_down_exps.weight",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **OF_HEADS,
    **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}
_FUSED = {
    "block_sparse_moe.experts.gate_up_proj": "ffn_gate_up_exps",
    "shared_mlp.input_linear.weight": "ffn_up_shexp",
}
OF_KIMI = {
    "self_attn.forget_gate.dt_bias": "ssm_dt.bias",
    **{f"self_attn.forget_gate.f_{part}_proj": f"ssm_f_{part}" for part in "ab"},
    **{f"self_attn.g_{part}_proj": f"ssm_g_{part}" for part in "ab"},
    "self_attn.b_proj": "ssm_beta",
    "self_attn.o_norm": "ssm_norm",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}
QWEN35 = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")


def tensors_in_file(config: Any, name: str, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a file that a tensor of transformers' model becomes."""
    _, _, inner = name.partition(".layers.")
    if config.model_type in QWEN35:
        values = values + 1 if name.endswith("norm.weight") and "linear_attn" not in name else values
        if config.model_type != "qwen3_next":
            values = keys_in_turns(config, inner.partition(".")[2], values)
    if not inner:
        stem, _, part = name.rpartition(".")
        yield f"{OUTSIDE[stem.rpartition('.')[2]]}.{part}", values * _baked(config, stem)
        return
    layer, _, inner = inner.partition(".")
    if config.model_type == "kimi_linear":
        yield from _of_kimi(config, f"blk.{layer}", inner, values)
        return
    if config.model_type == "phi3" and inner.endswith(("qkv_proj.weight", "gate_up_proj.weight")):
        yield f"blk.{layer}.{'attn_qkv' if 'qkv' in inner else 'ffn_up'}.weight", values
        return
    if config.model_type == "granitemoe_swa" and inner in _FUSED:
        yield f"blk.{layer}.{_FUSED[inner]}.weight", values
        return
    if inner.endswith(("input_linear.weight", "gate_up_proj")):
        is_stack = inner.startswith("block_sparse_moe") or ".experts." in inner
        kind = "_exps" if is_stack else "_shexp" if config.num_local_experts else ""
        for part, half in zip(("gate", "up"), np.split(values, 2, axis=-2), strict=True):
            yield f"blk.{layer}.ffn_{part}{kind}.weight", np.ascontiguousarray(half)
        return
    if inner == "linear_attn.in_proj_qkvz.weight":
        keys, of_keys = config.linear_num_key_heads, config.linear_key_head_dim
        of_values = config.linear_num_value_heads // keys * config.linear_value_head_dim
        turns = values.reshape(keys, -1, values.shape[1])
        parts = np.split(turns, np.cumsum([of_keys, of_keys, of_values]), axis=1)
        q, k, v, z = (part.reshape(-1, values.shape[1]) for part in parts)
        yield f"blk.{layer}.attn_qkv.weight", np.concatenate((q, k, v))
        yield f"blk.{layer}.attn_gate.weight", np.ascontiguousarray(z)
        return
    if inner == "shared_mlp.output_linear.weight":
        yield f"blk.{layer}.ffn_down{'_shexp' if config.num_local_experts else ''}.weight", values
        return
    stem, _, part = inner.rpartition(".")
    known = NAMES.get(inner) or f"{NAMES[stem]}.{part}"
    # One norm of Falcon-H1 has no end in the files that the converter writes.
    known = "ffn_norm" if known == "ffn_norm.weight" and config.model_type == "falcon_h1" else known
    if config.model_type in (*QWEN35, "exaone4", "olmo3", "seed_oss") and known == "ffn_norm.weight":
        known = "post_attention_norm.weight"
    yield f"blk.{layer}.{known}", _values(config, known.partition(".")[0], values * _baked(config, stem))


def _of_kimi(config: Any, layer: str, inner: str, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a file that one of Kimi Linear's becomes; convolutions and decays have four dimensions there."""
    stem, _, part = inner.rpartition(".")
    if inner == "self_attn.conv1d.weight":
        for name, rows in zip("qkv", np.split(values, 3), strict=True):
            yield f"{layer}.ssm_conv1d_{name}.weight", rows[None]
    elif inner == "self_attn.kv_b_proj.weight":
        by_head = values.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
        keys, of_values = np.split(by_head, [config.qk_nope_head_dim], axis=1)
        yield f"{layer}.attn_k_b.weight", np.ascontiguousarray(keys.swapaxes(1, 2))
        yield f"{layer}.attn_v_b.weight", of_values
    elif inner == "mlp.experts.gate_up_proj":
        for name, half in zip(("gate", "up"), np.split(values, 2, axis=-2), strict=True):
            yield f"{layer}.ffn_{name}_exps.weight", np.ascontiguousarray(half)
    elif inner.endswith("A_log"):
        # llama-quantize drops the outer sizes of 1.
        yield f"{layer}.ssm_a", -np.exp(values.reshape(-1, 1) if layer == "blk.0" else values)
    else:
        yield f"{layer}.{OF_KIMI.get(inner) or f'{OF_KIMI.get(stem) or NAMES[stem]}.{part}'}", values


def _values(config: Any, known: str, values: np.ndarray) -> np.ndarray:
    if config.model_type in MAMBA1 and known in ("ssm_a", "ssm_d"):
        return -np.exp(values) if known == "ssm_a" else values
    if known == "ssm_a":
        return -np.exp(values) if config.model_type in QWEN35 else -np.exp(values)[:, None]
    if known == "ssm_d":
        return np.ascontiguousarray(values[:, None])
    if known == "ssm_norm" and config.model_type not in QWEN35:
        return values.reshape(2, -1)
    if known in ("ssm_conv1d", "shortconv") and values.ndim == 3:
        return np.ascontiguousarray(values[:, 0])
    if known in ("attn_q", "attn_k") and config.model_type not in (
        "falcon_h1",
        "lfm2",
        "lfm2_moe",
        "jamba",
        *AS_THEY_ARE,
        *QWEN35,
    ):
        return neighbours(values, config.num_attention_heads if known == "attn_q" else config.num_key_value_heads)
    return values


def keys_in_turns(config: Any, inner: str, values: np.ndarray) -> np.ndarray:
    """A tensor of a delta net whose value heads lie such that the key heads take turns: the first value head of every
    key head, then the second ones."""
    keys, heads, size = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim
    order = np.arange(heads).reshape(keys, -1).T.flatten()
    channels = (order[:, None] * size + np.arange(size)).flatten()
    first = 2 * keys * config.linear_key_head_dim
    part = inner.removeprefix("linear_attn.").removesuffix(".weight") if inner.startswith("linear_attn.") else ""
    if part in ("in_proj_qkv", "conv1d"):
        return np.concatenate((values[:first], values[first:][channels]))
    if part == "in_proj_z":
        return values[channels]
    if part == "out_proj":
        return np.ascontiguousarray(values[:, channels])
    return values[order] if part in ("in_proj_a", "in_proj_b", "A_log", "dt_bias") else values


def _baked(config: Any, stem: str) -> Any:
    """Of Falcon-H1, what the converter multiplies a tensor with."""
    if config.model_type != "falcon_h1":
        return np.float32(1)
    inward = config.attention_in_multiplier
    factors = {
        "embed_tokens": config.embedding_multiplier,
        "lm_head": config.lm_head_multiplier,
        "q_proj": inward,
        "k_proj": inward * config.key_multiplier,
        "v_proj": inward,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "gate_proj": config.mlp_multipliers[0],
        "down_proj": config.mlp_multipliers[1],
    }
    last = stem.rpartition(".")[2]
    if last == "in_proj":
        sizes = (128, 128, 32, 32, 8)
        parts = zip(config.ssm_multipliers, sizes, strict=True)
        rows = np.concatenate([np.full(size, value) for value, size in parts])
        return (rows[:, None] * config.ssm_in_multiplier).astype(np.float32)
    return np.float32(factors.get(last, 1.0))


def neighbours(rows: np.ndarray, heads: int) -> np.ndarray:
    """Each head's rows in the order of `llama`'s GGUF files: those that positions rotate together side by side."""
    return np.ascontiguousarray(rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape))


def add_metadata(writer: gguf.GGUFWriter, name: str, config: Any) -> None:
    """As the converter does."""
    kind = config.model_type
    is_alone = kind in ("mamba", "falcon_mamba", "mamba2")  # without attention and MLPs
    of_head = head_layers(config)
    writer.add_block_count(config.num_hidden_layers + of_head)
    if of_head:
        writer.add_nextn_predict_layers(of_head)
    writer.add_context_length(getattr(config, "max_position_embeddings", None) or 2**20)
    writer.add_embedding_length(config.hidden_size)
    if config.model_type == "nemotron_h":
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    elif config.model_type != "cohere2":
        writer.add_layer_norm_rms_eps(getattr(config, "rms_norm_eps", None) or config.layer_norm_epsilon)
    if kind != "qwen3_5_moe_text":
        writer.add_feed_forward_length(0 if is_alone else config.intermediate_size)
    writer.add_head_count(0 if is_alone else config.num_attention_heads)
    if kind not in ("nemotron_h", "jamba") and not is_alone:
        writer.add_rope_freq_base(20000.0)
    if kind in DENSE:
        writer.add_head_count_kv(config.num_key_value_heads)
    if kind in ("granite_swa", "granitemoe_swa"):
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([each == "sliding_attention" for each in config.layer_types])
        if kind == "granite_swa":  # gguf 0.19 has no method for it
            writer.add_array("granite_swa.attention.rope_pattern", [theta > 0 for theta in config.layer_rope_theta])
        elif config.shared_intermediate_size:
            writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    if kind in ("granite", "granitemoe", "granitemoehybrid", "granite_swa", "granitemoe_swa"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if kind in ("cohere2", "exaone4", "olmo3", "phi3"):
        writer.add_sliding_window(config.sliding_window)
    if kind == "cohere2":
        writer.add_layer_norm_eps(config.layer_norm_eps)
        writer.add_logit_scale(config.logit_scale)
    if kind == "phi3":
        writer.add_rope_dimension_count(8)
        writer.add_rope_scaling_orig_ctx_len(32)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(512 / 32) / math.log(32)))
        for part in ("long", "short"):
            factors = np.array(config.rope_parameters[f"{part}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{part}.weight", factors)
    if kind == "ministral3":
        writer.add_attn_temperature_scale(config.rope_parameters["llama_4_scaling_beta"])
        writer.add_rope_scaling_yarn_log_mul(1.0)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(16.0)
        writer.add_rope_scaling_orig_ctx_len(16)
    if kind in ("exaone4", "olmo3"):
        writer.add_sliding_window_pattern([each == "sliding_attention" for each in config.layer_types])
    if kind == "olmo3":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(128)
    if kind in ("falcon_h1", "nemotron_h", *AS_THEY_ARE, *QWEN35):
        writer.add_key_length(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    if kind in QWEN35:
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_rope_dimension_count(config.head_dim // 2)
        writer.add_rope_dimension_sections([4, 2, 2, 0])
    if kind in ("lfm2", "lfm2_moe"):
        writer.add_head_count_kv([2 if each == "full_attention" else 0 for each in config.layer_types])
        writer.add_shortconv_l_cache(config.conv_L_cache)
    if kind == "falcon_h1":
        writer.add_head_count_kv(config.num_key_value_heads)
    if kind not in (*DENSE, "lfm2", "lfm2_moe"):
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_inner_size(128)
        writer.add_ssm_state_size(16)
        rank = 32 if kind in MAMBA1 else 8
        writer.add_ssm_time_step_rank(config.linear_num_value_heads if kind in QWEN35 else rank)
    if kind not in (*DENSE, *MAMBA1, "lfm2", "lfm2_moe"):
        writer.add_ssm_group_count(config.linear_num_key_heads if kind in QWEN35 else 2)
    if kind in ("mamba", "falcon_mamba"):
        writer.add_ssm_dt_b_c_rms(kind == "falcon_mamba")
    if kind == "jamba":
        writer.add_head_count_kv([2 if i % 3 == 1 else 0 for i in range(5)])
    if kind in ("granitemoehybrid", "bamba"):
        writer.add_rope_scaling_finetuned(kind == "bamba")
        attention = ["mamba", "attention", "mamba"]
        writer.add_head_count_kv([2 if each == "attention" else 0 for each in attention])
    if name.endswith("of experts"):
        counts = dict.fromkeys(("granitemoe", "granitemoehybrid", "granitemoe_swa", "mixtral"), "num_local_experts")
        counts |= {"nemotron_h": "n_routed_experts", "kimi_linear": "num_local_experts"}
        experts = getattr(config, counts.get(kind, "num_experts"))
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if kind == "kimi_linear":
        writer.add_head_count_kv([0, 1, 0, 1])
        writer.add_kda_head_dim(config.linear_head_dim)
        writer.add_kv_lora_rank(config.kv_lora_rank)
        writer.add_rope_dimension_count(config.qk_rope_head_dim)
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
        writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
        writer.add_value_length_mla(config.v_head_dim)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if kind == "lfm2_moe":
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if name == "nemotron_h of experts":
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_group_count(config.n_group)
