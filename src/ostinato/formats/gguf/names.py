"""What GGUF files call the tensors of a model, and what its own checkpoint calls them."""

from __future__ import annotations

import re

_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def checkpoint_name(name: str) -> str | None:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; None for a name that is not known."""
    stem, _, part = name.rpartition(".")
    if stem in _OUTSIDE:
        return f"{_OUTSIDE[stem]}.{part}"
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if found is None or found[2] not in _IN_LAYER:
        return None
    return f"model.layers.{found[1]}.{_IN_LAYER[found[2]]}.{part}"


def pairs_neighbours(architecture: str, name: str) -> bool:
    """Whether the rows of a tensor, in each head, lie such that the two that positions rotate together are neighbours;
    in checkpoints they lie half a head apart. So it is with queries and keys of `llama`."""
    return architecture == "llama" and re.fullmatch(r"blk\.\d+\.attn_[qk]\.(weight|bias)", name) is not None
