"""What tests of keys and values in 8 bits share: a cache of transformers that rounds as ours does, and prompts whose
tokens it decides."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from ostinato.engine.core import EngineCore
from ostinato.ops.quant.quantize import dequantize, quantize_int8
from tests.support.checkpoints import oracle, random_prompt, recipe
from tests.support.kept import kept
from tests.support.parity import Case, make_engine, proposed

INT8_NAMES = ("nemotron_h", "llama", "gemma3_text", "qwen3_5_text")
"""A hybrid, a transformer, one with windows, and one with delta rules and gates."""
LENGTH = 85
INT8_TOLERANCE = 2e-3
"""Of the largest logit. A difference in a key's last bit can be one of its 127 steps."""
GAP = 4e-3
"""Of the largest logit: what the two best tokens differ by at every step, so that such a difference decides nothing."""


class RoundingCache(DynamicCache):
    """transformers' cache, which keeps what is left of keys and values after rounding."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kept = (_rounded(each) for each in (key_states, value_states))
        both: tuple[torch.Tensor, torch.Tensor] = super().update(*kept, layer_idx, *args, **kwargs)
        return both


def _rounded(heads: torch.Tensor) -> torch.Tensor:
    return dequantize(*quantize_int8(heads.flatten(0, -2), None), None).view(heads.shape)


@torch.inference_mode()
def rounding_logits(name: str, text: list[int]) -> torch.Tensor:
    """[tokens, vocab] by transformers, of a whole text at once."""
    model = oracle(name)
    rounding = RoundingCache(config=model.config.get_text_config())
    logits: torch.Tensor = model(torch.tensor([text]), past_key_values=rounding, use_cache=True).logits[0]
    return logits


def int8_engine(name: str, **settings: Any) -> EngineCore:
    return make_engine(name, **({"kv_cache_dtype": "int8", "graph_mode": "none"} | settings))


@cache
def int8_case(name: str, length: int = LENGTH) -> Case:
    """A prompt that the plain path continues, with the logits of transformers, which decide every token."""
    return kept(("int8", recipe(name).to_json_string(), length), lambda: _find(name, length))


def _find(name: str, length: int) -> Case:
    engine = int8_engine(name, enable_prefix_caching=False)
    for seed in range(40):
        prompt = random_prompt(length, seed)
        tokens = proposed(engine, prompt, {"temperature": 0})
        logits = rounding_logits(name, prompt + tokens)[:-1]
        last = logits[length - 1 :]
        best, second = last.topk(2).values.unbind(-1)
        if (best - second > GAP * last.abs().amax(-1)).all() and last.argmax(-1).tolist() == tokens:
            return Case(prompt, tokens, logits)
    raise AssertionError(f"transformers decides for no prompt of {length} tokens that the plain path gives to {name}")
