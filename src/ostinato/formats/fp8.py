"""float8 weights of `quant_method: fp8`, as DeepSeek and Qwen write them. Imports no torch.

For a linear there are `weight` float8_e4m3 [out, in] and the scales by which it is multiplied: with
`weight_block_size` [high, wide] `weight_scale_inv` [out / high, in / wide], rounded up; without it one number, under
that name or as `weight_scale`.
"""

from __future__ import annotations

from ostinato.formats.config_checks import ConfigChecker
from ostinato.json_io import JsonMapping
from ostinato.plan.quantization import StoredWeights

PARTS = ("weight_scale_inv", "weight_scale")
SUPPORTED = (
    "supported: quant_method fp8 with fmt e4m3, activation_scheme dynamic (activations are left as they are), and "
    "weight_block_size of two numbers or none"
)


def read_fp8(given: JsonMapping) -> StoredWeights:
    config = ConfigChecker(given, SUPPORTED)
    config.expect("fmt", "e4m3", "float8_e4m3fn", default="e4m3")
    config.expect("activation_scheme", "dynamic", default="dynamic")
    # Powers of two are float32 numbers here too.
    config.expect("scale_fmt", None, "float", "ue8m0")
    config.expect("expert_dtype", None, "fp8")
    config.refuse("modules_to_convert")
    block = given.get("weight_block_size")
    if block is not None and not _is_block(block):
        raise config.unsupported("weight_block_size", block)
    ignore = (*config.names("modules_to_not_convert", "ignored_layers"), "lm_head")
    return StoredWeights(
        "fp8",
        "float8",
        ignore=ignore,
        ignores_stacks=True,
        is_packed=False,
        block=(0, 0) if block is None else (block[0], block[1]),
        wants_small_activations=True,
    )


def _is_block(block: object) -> bool:
    return (
        isinstance(block, list | tuple)
        and len(block) == 2
        and all(isinstance(each, int) and not isinstance(each, bool) and each > 0 for each in block)
    )
