"""Cost of quantised weights, activations, keys and values: a comparison of their logits with those without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ostinato.config import EngineConfig
from ostinato.engine.core import EngineCore
from ostinato.errors import ConfigError, Remedy
from ostinato.ops.arrays import host_values
from ostinato.ops.quant.block_formats import BLOCK_FORMATS
from ostinato.plan.quantization import weights_alone
from ostinato.verify.engine_configs import plain_config, with_cache
from ostinato.verify.reference_run import text_logits

Text = tuple[Sequence[int], Sequence[int]]
"""Token ids of a prompt and of what follows it."""


@dataclass(frozen=True)
class LogitLoss:
    """Loss over the logits before each of `positions` tokens, which both models compute after the same tokens.

    `mean_difference` and `largest_difference` are of absolute differences, as fractions of the largest absolute logit
    of the position; `kl_divergence` is the mean KL divergence of the distributions, in nats; `same_greedy` is the
    fraction of positions with the same best token.
    """

    positions: int
    mean_difference: float
    largest_difference: float
    kl_divergence: float
    same_greedy: float


def exact_config(config: EngineConfig) -> EngineConfig:
    """Return the settings of the model that is not quantised.

    If only activations, keys and values are quantised, the weights stay the same. ConfigError if nothing is quantised.
    """
    keeps_weights = config.quantization in ("auto", "none")
    if keeps_weights and config.kv_cache_dtype == config.activation_dtype == "auto":
        message = (
            f"logits are compared with those of the weights before they were quantised, or of activations, keys and "
            f"values that are not; quantization {config.quantization} quantises none, and activation_dtype and "
            "kv_cache_dtype are auto"
        )
        remedies = [Remedy("quantization", "int8"), Remedy("quantization", "int4"), Remedy("kv_cache_dtype", "int8")]
        raise ConfigError(message, remedies)
    weights = config.quantization if keeps_weights else "none"
    return config.with_settings(quantization=weights, activation_dtype="auto", kv_cache_dtype="auto")


def compare_logits(engine: EngineCore, exact: EngineConfig, texts: Sequence[Text]) -> LogitLoss:
    """Measure the loss of `engine`'s model on the second part of each text, computed in one step per text.

    No request of the engine runs; its prefix cache is emptied. `exact` is as `exact_config` returns it. ConfigError if
    the checkpoint itself is quantised, so that there are no other weights.
    """
    stored = engine.spec.stored_quantization
    weights = weights_alone(engine.spec.quantization)
    has_others = stored is None or weights not in map(stored.quantization, ((), tuple(BLOCK_FORMATS)))
    if exact.quantization == "none" and not has_others:
        message = "the checkpoint holds quantised weights alone: there are no others to compare their logits with"
        raise ConfigError(message)
    engine.reset_prefix_cache()
    longest = max(len(prompt) + len(answer) for prompt, answer in texts)
    plain = plain_config(exact.with_settings(max_model_len=max(longest, 2)), longest)
    reference = EngineCore(with_cache(plain, [None], 1))
    rows = [_differences(engine, reference, *text) for text in texts if len(text[1])]
    relative, largest, divergence, same = np.concatenate(rows).T
    return LogitLoss(
        positions=len(relative),
        mean_difference=float(relative.mean()),
        largest_difference=float(largest.max()),
        kl_divergence=float(divergence.mean()),
        same_greedy=float(same.mean()),
    )


def _differences(engine: EngineCore, reference: EngineCore, prompt: Sequence[int], answer: Sequence[int]) -> np.ndarray:
    """Compute mean and largest difference, KL divergence and agreement on the best token, [tokens, 4] float64."""
    given, exact = (
        host_values(text_logits(each, prompt, answer[:-1], len(answer))).astype(np.float64)
        for each in (engine, reference)
    )
    apart = np.abs(given - exact) / np.abs(exact).max(-1, keepdims=True)
    expected = _log_softmax(exact)
    divergence = (np.exp(expected) * (expected - _log_softmax(given))).sum(-1)
    same = given.argmax(-1) == exact.argmax(-1)
    return np.stack((apart.mean(-1), apart.max(-1), divergence, same), axis=-1)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted: np.ndarray = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
