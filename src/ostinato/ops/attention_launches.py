from typing import NamedTuple
ROW_SPAN = 128
class AttentionLaunch(NamedTuple):
    rows: int
    keys: int
    segments: int
    warps: int
    stages: int
    combine_warps: int = 2
class E(NamedTuple):
    elements: int = 1024
    warps: int = 4
class H(NamedTuple):
    heads: int = 8
    warps: int = 4
class P(NamedTuple):
    rows: int = 16
    outputs: int = 32
    inputs: int = 128
    warps: int = 4
    stages: int = 3
    keys: int = 64
def attention_launch(*, tokens, rows, heads, kv_heads, head_dim, context, element_bytes):
    group = heads // kv_heads
    few = -(-tokens // rows) * group <= 16
    segments = 1
    if few:
        segments = max(1, min(16, context // 128, 512 // (rows * kv_heads)))
    least = max(16, 1 << (group - 1).bit_length())
    return AttentionLaunch(max(least, 16 if few else 64), 64 if element_bytes == 2 else 32, segments, 4, 2)
def heads_launch(*, heads, head_dim): return H(min(8, 1 << (heads - 1).bit_length()))
def elements_launch(): return E()
def sample_launch(): return E()
def sort_launch(): return E()
def threshold_launch(): return E(4096, 16)
def encoder_attention_launch(*, head_dim, element_bytes): return P(rows=64, keys=32, stages=2)
def route_launch(*, element_bytes): return P(16, 16, 128)
def _inp(group_size): 
    return max(16, min(128, 1 << (group_size - 1).bit_length()))
def quantized_launch(*, tokens, group_size, element_bytes):
    return P(16 if tokens <= 16 else 64, 32 if tokens<=16 else 64, _inp(group_size))
def moe_launch(*, choices, experts, group_size, gated, element_bytes):
    return P(16 if choices <= 16 * experts else 64, 64, 64 if group_size is None else _inp(group_size))
