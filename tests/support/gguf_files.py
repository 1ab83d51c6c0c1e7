"""Tiny GGUF files, written with the `gguf` package from checkpoints that transformers makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from tokenizers import pre_tokenizers

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
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**CONFIG),
    "qwen2": lambda: transformers.Qwen2Config(**CONFIG, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**CONFIG, head_dim=32),
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
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
    one of `kinds`, which have that one's; `metadata` more names and values. What
    transformers makes of the same weights is saved in a folder of the file's name without its suffix."""
    torch.manual_seed(7)
    config = CONFIGS[architecture]()
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.1 if parameter.dim() > 1 else 0.3))
            if "norm" in name:
                parameter += 1
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(20000.0)
    if architecture == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    tokens, types, merges = vocabulary()
    padding = [f"[PAD{i}]" for i in range(config.vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens + padding)
    writer.add_token_types(types + [5] * len(padding))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)
    for name, value in metadata.items():
        writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, part = name.rpartition(".")
        inside = stem.removeprefix("model.layers.").partition(".")[2]
        own = [each for part, each in (kinds or {}).items() if part in NAMES.get(stem, NAMES.get(inside, ""))]
        number = gguf.GGMLQuantizationType[own[0] if own else kind]
        if tensor.dim() > 1:
            tensor.copy_(torch.from_numpy(gguf.dequantize(gguf.quantize(tensor.numpy(), number), number)))
        values = tensor.numpy()
        if stem.startswith("model.layers."):
            layer, _, inner = stem.removeprefix("model.layers.").partition(".")
            stem = f"blk.{layer}.{NAMES[inner]}"
            if architecture == "llama" and inner in ("self_attn.q_proj", "self_attn.k_proj"):
                heads = config.num_attention_heads if inner.endswith("q_proj") else config.num_key_value_heads
                values = _neighbours(values, heads)
        else:
            stem = NAMES[stem]
        if tensor.dim() > 1:
            writer.add_tensor(f"{stem}.{part}", gguf.quantize(values, number), raw_dtype=number)
        else:
            writer.add_tensor(f"{stem}.{part}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model.save_pretrained(path.with_suffix(""))
    return path


def _neighbours(rows: np.ndarray, heads: int) -> np.ndarray:
    """Each head's rows in the order of `llama`'s GGUF files: those that positions rotate together side by side."""
    return np.ascontiguousarray(rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape))
