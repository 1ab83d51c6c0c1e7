"""Names of a model's tensors in GGUF files, and the corresponding names of its checkpoint. Imports no torch.

The names are those of gguf-py (github.com/ggml-org/llama.cpp, gguf-py/gguf/constants.py and tensor_mapping.py). The
tables map names in a layer; `.weight` or `.bias` follows each. `architectures.py` says which model has which.
"""

from __future__ import annotations

import math

from ostinato.plan.weights import EACH as EACH

GATE, UP = ":gate", ":up"
"""Suffixes of a checkpoint tensor's name: the first or the second half of its rows.

They are for checkpoint tensors that a GGUF file has as two tensors.
"""
KEYS, VALUES = ":keys", ":values"
"""Suffixes of the name of a checkpoint tensor with the rows of each head's key, then of its value.

A GGUF file has two tensors: each head's matrix for keys, transposed, and each head's matrix for values.
"""

ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
}
LLAMA = ATTENTION | {
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
DEEPSEEK2 = {name: value for name, value in LLAMA.items() if name not in ("attn_k", "attn_v")} | {
    **{f"attn_q_{part}": f"self_attn.q_{part}_proj" for part in "ab"},
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_k_b": f"self_attn.kv_b_proj{KEYS}",
    "attn_v_b": f"self_attn.kv_b_proj{VALUES}",
}
OLMO = {name: value for name, value in LLAMA.items() if name not in ("attn_norm", "ffn_norm")} | {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
PHI3 = {name: value for name, value in LLAMA.items() if name not in ("attn_q", "attn_k", "attn_v", "ffn_gate")} | {
    "attn_qkv": "self_attn.qkv_proj",
    "ffn_up": "mlp.gate_up_proj",
}
SEED_OSS = {("post_attention_norm" if name == "ffn_norm" else name): value for name, value in LLAMA.items()}
NUMBERED = (("gate", 1), ("up", 3), ("down", 2))
"""Matrices of an MLP that a checkpoint calls w1 to w3."""
_WITHOUT_MLP = {name: value for name, value in LLAMA.items() if not value.startswith("mlp.")}
_ROUTED = {
    "ffn_gate_inp": "mlp.gate",
    **{f"ffn_{part}_exps": f"mlp.experts.{EACH}.{part}_proj" for part in ("gate", "up", "down")},
}
MIXTRAL = _WITHOUT_MLP | {
    "ffn_gate_inp": "block_sparse_moe.gate",
    **{
        f"ffn_{part}_exps": f"block_sparse_moe.experts.{EACH}.w{i}" for i, part in ((1, "gate"), (3, "up"), (2, "down"))
    },
}
QWEN3_MOE = _WITHOUT_MLP | _ROUTED
QWEN3_VL_MOE_WHOLE = {
    "ffn_gate_exps.weight": f"mlp.experts.gate_up_proj{GATE}",
    "ffn_up_exps.weight": f"mlp.experts.gate_up_proj{UP}",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
}
GEMMA3 = LLAMA | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GEMMA4 = GEMMA3 | {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "ffn_gate_inp": "router.proj",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}
GEMMA4_WHOLE = {
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "ffn_gate_exps.weight": f"experts.gate_up_proj{GATE}",
    "ffn_up_exps.weight": f"experts.gate_up_proj{UP}",
    "ffn_down_exps.weight": "experts.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
GEMMA4_OUTER = {
    "per_layer_token_embd": "embed_tokens_per_layer",
    "per_layer_model_proj": "per_layer_model_projection",
    "per_layer_proj_norm": "per_layer_projection_norm",
}


def mamba2_names(mixer: str) -> dict[str, str]:
    """Return the names of a Mamba-2 mixer."""
    names = {"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_norm": "norm", "ssm_out": "out_proj"}
    return {name: f"{mixer}.{value}" for name, value in names.items()}


FEED_FORWARD = {
    "ffn_norm": "pre_ff_layernorm",
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
}
_SHARED = {"gate": f"shared_mlp.input_linear{GATE}", "up": f"shared_mlp.input_linear{UP}"}
GRANITE = {
    **ATTENTION,
    **mamba2_names("mamba"),
    "ffn_norm": "post_attention_layernorm",
    **{f"ffn_{part}{behind}": name for part, name in _SHARED.items() for behind in ("", "_shexp")},
    **{f"ffn_down{behind}": "shared_mlp.output_linear" for behind in ("", "_shexp")},
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_exps": f"block_sparse_moe.input_linear{GATE}",
    "ffn_up_exps": f"block_sparse_moe.input_linear{UP}",
    "ffn_down_exps": "block_sparse_moe.output_linear",
}
GRANITE_SWA = ATTENTION | {
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "block_sparse_moe.router",
    "ffn_up_shexp": "shared_mlp.input_linear",
    "ffn_down_shexp": "shared_mlp.output_linear",
}
SINKS = {"attn_sinks.weight": "self_attn.sinks"}
GRANITE_SWA_WHOLE = SINKS | {
    "ffn_gate_up_exps.weight": "block_sparse_moe.experts.gate_up_proj",
    "ffn_gate_exps.weight": f"block_sparse_moe.experts.gate_up_proj{GATE}",
    "ffn_up_exps.weight": f"block_sparse_moe.experts.gate_up_proj{UP}",
    "ffn_down_exps.weight": "block_sparse_moe.experts.down_proj",
}
NEMOTRON = {
    "attn_norm": "norm",
    **{f"attn_{part}": f"mixer.{part}_proj" for part in "qkv"},
    "attn_output": "mixer.o_proj",
    **mamba2_names("mixer"),
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
LFM2 = {
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
QWEN35 = {
    **{name: value for name, value in LLAMA.items() if name != "ffn_norm"},
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
GPT_OSS = ATTENTION | {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"}
GPT_OSS_WHOLE = {
    **SINKS,
    **{
        f"ffn_{part}_exps.{end}": f"mlp.experts.{name}{'_bias' if end == 'bias' else ''}{half}"
        for part, name, half in (("gate", "gate_up_proj", GATE), ("up", "gate_up_proj", UP), ("down", "down_proj", ""))
        for end in ("weight", "bias")
    },
}
LFM2_MOE = LFM2 | {
    "ffn_gate_inp": "feed_forward.gate",
    **{f"ffn_{part}_exps": f"feed_forward.experts.{EACH}.w{i}" for part, i in NUMBERED},
}
QWEN35_MOE = {name: value for name, value in QWEN35.items() if not name.startswith("ffn_")} | {
    **_ROUTED,
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
}
QWEN3_NEXT = QWEN35_MOE | {"ssm_ba": "linear_attn.in_proj_ba"}
FALCON = ATTENTION | mamba2_names("mamba") | FEED_FORWARD
MAMBA2 = {"attn_norm": "norm"} | mamba2_names("mixer")
_MAMBA1 = {"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_x": "x_proj", "ssm_dt": "dt_proj", "ssm_out": "out_proj"}
MAMBA = {"attn_norm": "norm"} | {name: f"mixer.{value}" for name, value in _MAMBA1.items()}
KIMI_LINEAR = {name: value for name, value in LLAMA.items() if not name.endswith(("q_norm", "k_norm"))} | {
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": f"self_attn.kv_b_proj{KEYS}",
    "attn_v_b": f"self_attn.kv_b_proj{VALUES}",
    **{f"ssm_conv1d_{part}": f"self_attn.{part}_conv1d" for part in "qkv"},
    **{f"ssm_{part}": f"self_attn.{part}_proj" for part in ("f_a", "f_b", "g_a", "g_b")},
    "ssm_beta": "self_attn.b_proj",
    "ssm_norm": "self_attn.o_norm",
    "ffn_gate_inp": "block_sparse_moe.gate",
    **{f"ffn_{part}_exps": f"block_sparse_moe.experts.{EACH}.w{i}" for part, i in NUMBERED},
    **{f"ffn_{part}_shexp": f"block_sparse_moe.shared_experts.{part}_proj" for part, _ in NUMBERED},
}
JAMBA = {
    **{name: value for name, value in ATTENTION.items() if not name.endswith(("q_norm", "k_norm"))},
    **{name: f"mamba.{value}" for name, value in _MAMBA1.items()},
    **{f"ssm_{part}_norm": f"mamba.{part}_layernorm" for part in ("dt", "b", "c")},
    **FEED_FORWARD,
    "ffn_gate_inp": "feed_forward.router",
    **{f"ffn_{part}_exps": f"feed_forward.experts.{EACH}.{part}_proj" for part in ("gate", "up", "down")},
}
IN_HEAD = {
    "nextn.eh_proj": "fc",
    "nextn.enorm": "pre_fc_norm_embedding",
    "nextn.hnorm": "pre_fc_norm_hidden",
    "nextn.shared_head_norm": "norm",
}
"""Names in the prediction head of models with delta nets, except its layer. In a file the head is one more block."""
BARE = {"ssm_a": "A_log", "ssm_d": "D", "ssm_dt.bias": "dt_bias"}
"""Names in a mixer without `.weight` or `.bias`."""

CONVOLUTIONS = (
    ".shortconv.conv.weight",
    ".ssm_conv1d.weight",
    *(f".ssm_conv1d_{part}.weight" for part in "qkv"),
)

_OF_SIGLIP = {
    "v.patch_embd": "embeddings.patch_embedding",
    "v.position_embd": "embeddings.position_embedding",
    "v.post_ln": "post_layernorm",
    **{f"v.blk.N.ln{i}": f"encoder.layers.N.layer_norm{i}" for i in (1, 2)},
    **{f"v.blk.N.attn_{part}": f"encoder.layers.N.self_attn.{part}_proj" for part in ("q", "k", "v", "out")},
    "v.blk.N.ffn_up": "encoder.layers.N.mlp.fc1",
    "v.blk.N.ffn_down": "encoder.layers.N.mlp.fc2",
}
GEMMA3_IMAGES = {
    **{name: f"vision_tower.{value}" for name, value in _OF_SIGLIP.items()},
    "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
    "mm.input_projection.weight": "multi_modal_projector.mm_input_projection_weight",
}
LFM2_IMAGES = {
    **{name: f"model.vision_tower.{value}" for name, value in _OF_SIGLIP.items()},
    **{f"mm.{i}": f"model.multi_modal_projector.linear_{i}" for i in (1, 2)},
    "mm.input_norm": "model.multi_modal_projector.layer_norm",
}
FRAMES = (":frame0", ":frame1")
"""Suffixes of the name of a convolution over two frames, which a GGUF file has as one tensor each."""
QWEN_IMAGES = {
    "v.patch_embd.weight": f"model.visual.patch_embed.proj.weight{FRAMES[0]}",
    "v.patch_embd.weight.1": f"model.visual.patch_embed.proj.weight{FRAMES[1]}",
    "v.patch_embd.bias": "model.visual.patch_embed.proj.bias",
    "v.position_embd": "model.visual.pos_embed",
    "v.post_ln": "model.visual.merger.norm",
    "mm.0": "model.visual.merger.linear_fc1",
    "mm.2": "model.visual.merger.linear_fc2",
    **{f"v.blk.N.ln{i}": f"model.visual.blocks.N.norm{i}" for i in (1, 2)},
    "v.blk.N.attn_qkv": "model.visual.blocks.N.attn.qkv",
    "v.blk.N.attn_out": "model.visual.blocks.N.attn.proj",
    "v.blk.N.ffn_up": "model.visual.blocks.N.mlp.linear_fc1",
    "v.blk.N.ffn_down": "model.visual.blocks.N.mlp.linear_fc2",
    "v.deepstack.N.norm": "model.visual.deepstack_merger_list.N.norm",
    **{f"v.deepstack.N.fc{i}": f"model.visual.deepstack_merger_list.N.linear_fc{i}" for i in (1, 2)},
}
"""Names of an encoder's tensors; N is the number of a layer."""
OF_ENCODER = ("v.", "mm.")
"""Beginnings of the names in an encoder's file."""

ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS = (
    f"rope_{part}.weight" for part in ("freqs", "factors_long", "factors_short")
)
"""Divisors of the frequencies of positions, two lists with LongRoPE."""
NO_WEIGHTS = (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)


_OF_HEADS = (".ssm_a", ".ssm_d", ".ssm_norm.weight")


def checkpoint_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that a tensor has in a checkpoint, where the model has the `expected` one.

    Only some tensors of mixers, the one row of a gate, and patches as a matrix have another shape there.
    """
    if name.endswith(CONVOLUTIONS) and len(shape) > 1:
        return (math.prod(shape[:-1]), 1, shape[-1])
    if name.endswith(_OF_HEADS):
        # Writers add and drop sizes of 1; a norm may have one row for each group.
        sizes = [size for size in expected if size > 1]
        is_same = [size for size in shape if size > 1] == sizes or len(sizes) < 2
        return expected if is_same and math.prod(shape) == math.prod(expected) else shape
    if name == "v.patch_embd.weight" and len(shape) == 4 and len(expected) == 2:
        return (shape[0], math.prod(shape[1:]))
    return (1, *shape) if name.endswith(".ffn_gate_inp_shexp.weight") and len(shape) == 1 else shape


def is_changed(name: str) -> bool:
    """Return whether `to_checkpoint_layout` must convert this tensor to the checkpoint's form."""
    return name.endswith((*_OF_HEADS, *CONVOLUTIONS))
