"""Tiny GGUF files, written with the `gguf` package from checkpoints that transformers makes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from tokenizers import pre_tokenizers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.support.gguf_heads import add_to_checkpoint, head_of, tensors_of
from tests.support.gguf_hybrids import HYBRIDS, add_metadata, neighbours, tensors_in_file

CONFIG = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
}
GEMMA4_SHARED = ["sliding_attention", "full_attention"]
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**CONFIG),
    "qwen2": lambda: transformers.Qwen2Config(**CONFIG, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**CONFIG, head_dim=32),
    "gemma2": lambda: transformers.Gemma2Config(
        **CONFIG
        | {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 12, "num_hidden_layers": 3}
        | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **CONFIG
        | {"num_hidden_layers": 7, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 12}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 20000.0, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            }
        }
    ),
    "gemma4": lambda: transformers.Gemma4TextConfig(
        **CONFIG
        | {
            "num_hidden_layers": 5,
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": 12,
            "num_kv_shared_layers": 2,
        }
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 4, "use_double_wide_mlp": True}
        | {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 320, "final_logit_softcapping": 5.0}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention", *GEMMA4_SHARED]}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "rope_theta": 20000.0, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
            }
        }
    ),
}
# With a padding token, transformers' from_pretrained makes a row of Youtu's embedding zero.
CONFIGS["deepseek2"] = lambda: transformers.YoutuConfig(
    **CONFIG
    | {"pad_token_id": None}
    | {"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8}
    | {"qk_nope_head_dim": 12, "v_head_dim": 16}
)
CONFIGS["deepseek2 without a latent of queries"] = lambda: transformers.YoutuConfig(
    **CONFIGS["deepseek2"]().to_dict() | {"q_lora_rank": None, "tie_word_embeddings": False}
)
CONFIGS["gemma4 of experts"] = lambda: transformers.Gemma4TextConfig(
    **CONFIGS["gemma4"]().to_dict()
    | {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "use_double_wide_mlp": False, "num_experts": 6}
    | {"enable_moe_block": True, "top_k_experts": 2, "moe_intermediate_size": 64}
)
CONFIGS["gemma4 of experts apart"] = lambda: transformers.Gemma4TextConfig(
    **CONFIGS["gemma4 of experts"]().to_dict() | {"gates_apart": True}
)
OF_GEMMA4_EXPERTS = {
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
}
SCALINGS = {
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
    "linear": {"factor": 2.5},
}
for _name, _facts in SCALINGS.items():
    _rope = {"rope_parameters": {"rope_type": _name, "rope_theta": 20000.0, **_facts}}
    CONFIGS[f"llama by {_name}"] = partial(transformers.LlamaConfig, **CONFIG | _rope)
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GEMMA4 = {
    "router.proj": "ffn_gate_inp",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}
TEMPLATE = "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>{% endfor %}<s>assistant:"


def vocabulary() -> tuple[list[str], list[int], list[str]]:
    """Tokens, their types and merges: two control tokens, the 256 bytes, and some merges of them."""
    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "1 2", "Ċ Ċ", "Ġ Ġ", "' s", "t h", "th e"]
    tokens += [merge.replace(" ", "") for merge in merges]
    types = [3, 3, *[1] * (len(tokens) - 2)]
    return tokens, types, merges


def write_gguf(
    path: Path,
    architecture: str,
    kind: str = "Q8_0",
    pre: str = "qwen2",
    kinds: dict[str, str] | None = None,
    **metadata: Any,
) -> Path:
    """A model of random weights, linears and embedding in blocks of `kind`, but for those whose names in the file hold
    one of `kinds`, which have that one's; `metadata` more names and values, None for none. What
    transformers makes of the same weights is saved in a folder of the file's name without its suffix."""
    torch.manual_seed(7)
    plain = (architecture.split()[0], CONFIGS.get(architecture))
    stated, make_config = HYBRIDS.get(architecture, plain)
    config = make_config()
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _randomize(model)
    head = head_of(config)
    writer = gguf.GGUFWriter(str(path), stated)
    if architecture in HYBRIDS:
        add_metadata(writer, architecture, config)
    else:
        _add_metadata(writer, stated, config)
    _add_tokenizer(writer, config.vocab_size, pre)
    for name, value in metadata.items():
        if value is None:
            writer.kv_data[0].pop(name)
        else:
            writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    for name, tensor in (model.state_dict() | tensors_of(config, head)).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        in_file = tensors_in_file if architecture in HYBRIDS else _in_file
        called = next(iter(in_file(config, name, tensor.numpy())))[0]
        own = [each for part, each in (kinds or {}).items() if part in called]
        number = gguf.GGMLQuantizationType[own[0] if own else kind]
        is_quantised = tensor.dim() > 1 and not name.endswith(
            (
                "conv1d.weight",
                "conv.weight",
                "gate.weight",
                "router.weight",
                "router.proj.weight",
                "kv_b_proj.weight",
                "A_log",
            )
        )
        # What is multiplied into Falcon-H1's weights is so before they are quantised.
        if is_quantised and config.model_type != "falcon_h1":
            tensor.copy_(torch.from_numpy(gguf.dequantize(gguf.quantize(tensor.numpy(), number), number)))
        for called, value in in_file(config, name, tensor.numpy()):
            if is_quantised:
                writer.add_tensor(called, gguf.quantize(value, number), raw_dtype=number)
            else:
                writer.add_tensor(called, np.ascontiguousarray(value))
    _written(writer, path)
    model.save_pretrained(path.with_suffix(""))
    add_to_checkpoint(path.with_suffix(""), head)
    return path


def _randomize(model: transformers.PreTrainedModel) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.rand_like(parameter) * 2)
                continue
            parameter.copy_(torch.randn_like(parameter) * (0.1 if parameter.dim() > 1 else 0.3))
            if "norm" in name:
                parameter += 1
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)


def _in_file(config: Any, name: str, values: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """A tensor under the name that the file has for it."""
    stem, _, part = name.rpartition(".")
    names = NAMES
    if config.model_type in ("gemma2", "gemma3_text"):
        names, values = NAMES | GEMMA_NORMS, values + 1 if name.endswith("norm.weight") else values
    if config.model_type == "gemma4_text":
        names = NAMES | GEMMA_NORMS | GEMMA4
    if part == "layer_scalar":
        return [(f"blk.{stem.rpartition('.')[2]}.layer_output_scale.weight", values)]
    for inner, in_file in OF_GEMMA4_EXPERTS.items():
        if name.endswith(f".{inner}"):
            layer = name.split(".")[2]
            if inner == "experts.gate_up_proj" and getattr(config, "gates_apart", False):
                halves = zip(("gate", "up"), np.split(values, 2, axis=1), strict=True)
                return [(f"blk.{layer}.ffn_{part}_exps.weight", np.ascontiguousarray(half)) for part, half in halves]
            return [(f"blk.{layer}.{in_file}", values)]
    if not stem.startswith("model.layers."):
        return [(f"{names[stem]}.{part}", values)]
    layer, _, inner = stem.removeprefix("model.layers.").partition(".")
    if config.model_type == "llama" and inner in ("self_attn.q_proj", "self_attn.k_proj"):
        heads = config.num_attention_heads if inner.endswith("q_proj") else config.num_key_value_heads
        values = neighbours(values, heads)
    if inner == "self_attn.kv_b_proj":
        by_head = values.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
        keys, of_values = np.split(by_head, [config.qk_nope_head_dim], axis=1)
        return [(f"blk.{layer}.attn_k_b.weight", keys.swapaxes(1, 2)), (f"blk.{layer}.attn_v_b.weight", of_values)]
    return [(f"blk.{layer}.{names[inner]}.{part}", values)]


def _add_metadata(writer: gguf.GGUFWriter, architecture: str, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    if architecture != "gemma4":
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count_kv(1 if architecture == "deepseek2" else config.num_key_value_heads)
    if architecture == "deepseek2":
        _add_latents(writer, config)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(20000.0)
    if architecture in ("qwen3", "gemma2", "gemma3"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if architecture in ("gemma2", "gemma3"):
        writer.add_sliding_window(config.sliding_window)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture == "gemma4":
        _add_gemma4(writer, config)
    scaling = config.rope_parameters.get("full_attention", config.rope_parameters)
    if scaling["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling["rope_type"]))
        writer.add_rope_scaling_factor(scaling["factor"])
        if "original_max_position_embeddings" in scaling:
            writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    if scaling["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _rope_factors(config))


def _add_latents(writer: gguf.GGUFWriter, config: Any) -> None:
    """Lengths of keys and values as the cache has them, and as the heads have them."""
    writer.add_leading_dense_block_count(config.num_hidden_layers)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_expert_shared_count(0)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)


def _add_gemma4(writer: gguf.GGUFWriter, config: Any) -> None:
    """Numbers of each layer, and divisors of the frequencies without a window, huge for elements that do not turn."""
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    shared, width = config.num_kv_shared_layers, config.intermediate_size
    writer.add_feed_forward_length([width] * (len(slides) - shared) + [2 * width] * shared)
    writer.add_head_count_kv([2 if slid else 4 for slid in slides])
    writer.add_key_length(32)
    writer.add_value_length(32)
    writer.add_key_length_swa(16)
    writer.add_value_length_swa(16)
    writer.add_rope_dimension_count(32)
    writer.add_rope_dimension_count_swa(16)
    writer.add_rope_freq_base_swa(700.0)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(slides)
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * 8 + [1e30] * 8, dtype=np.float32))


def _rope_factors(config: Any) -> np.ndarray:
    """What llama3 divides each frequency by."""
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, None)
    size = config.hidden_size // config.num_attention_heads
    plain = 20000.0 ** -(torch.arange(0, size, 2, dtype=torch.float32) / size)
    return (plain / scaled).numpy()


def _add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int, pre: str) -> None:
    tokens, types, merges = vocabulary()
    padding = [f"[PAD{i}]" for i in range(vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens + padding)
    writer.add_token_types(types + [5] * len(padding))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)


def with_biases(path: Path, other: Path, names: list[str], value: float) -> Path:
    """The same model in the file `other`, with biases of one value beside the weights of these names, in its first
    layer that has them."""
    reader = gguf.GGUFReader(path)
    shapes = {tensor.name: tensor.shape for tensor in reader.tensors}
    writer = _writer_of(reader, other)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    for name in names:
        weight = name.replace(".bias", ".weight")
        layer = next(i for i in range(9) if f"blk.{i}.{weight}" in shapes)
        writer.add_tensor(f"blk.{layer}.{name}", np.full(shapes[f"blk.{layer}.{weight}"][-1], value, dtype=np.float32))
    return _written(writer, other)


def _writer_of(reader: Any, path: Path) -> gguf.GGUFWriter:
    """A writer with the metadata of a file."""
    writer = gguf.GGUFWriter(str(path), reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=sub_type)
    return writer


def _written(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def split_gguf(path: Path, count: int) -> list[Path]:
    """The same model in `count` files, as llama.cpp's gguf-split makes them: the first has the metadata."""
    reader = gguf.GGUFReader(path)
    tensors, parts = reader.tensors, []
    for number in range(count):
        part = path.with_name(f"{path.stem}-{number + 1:05}-of-{count:05}.gguf")
        stated = reader.fields["general.architecture"].contents()
        writer = _writer_of(reader, part) if number == 0 else gguf.GGUFWriter(str(part), stated)
        writer.add_key_value("split.no", number, gguf.GGUFValueType.UINT16)
        writer.add_key_value("split.count", count, gguf.GGUFValueType.UINT16)
        writer.add_key_value("split.tensors.count", len(tensors), gguf.GGUFValueType.INT32)
        for tensor in tensors[number::count]:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        parts.append(_written(writer, part))
    return parts
