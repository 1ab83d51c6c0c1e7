"""Logits of the tokens of a few clusters, chosen and spread over the vocabulary on the host."""

from __future__ import annotations

from typing import cast

import numpy as np

from ostinato.errors import ModelError
from ostinato.ops.arrays import host_values
from ostinato.ops.step_inputs import Array


def cluster_tokens(ordering: Array, num_clusters: int) -> np.ndarray:
    """Return the tokens of each cluster, [clusters, tokens] int64.

    `ordering` [vocab] float32 has the tokens of the first cluster, then those of the second, and so on. ModelError if a
    number in it is no token.
    """
    ids = host_values(ordering).astype(np.int64)
    wrong = ids[(ids < 0) | (ids >= len(ids))]
    if len(wrong):
        raise ModelError(f"masked_embedding.token_ordering has a token {wrong[0]}; they are 0 to {len(ids) - 1}")
    return ids.reshape(num_clusters, -1)


def best_tokens(scores: Array, clusters: np.ndarray, top: int) -> np.ndarray:
    """Return the tokens of each row's `top` clusters of highest score, [rows, clusters] -> [rows, tokens] int64."""
    best = np.argpartition(-host_values(scores).astype(np.float32), top - 1, axis=1)[:, :top]
    tokens: np.ndarray = clusters[best].reshape(len(best), -1)
    return tokens


def spread_logits(logits: Array, tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return logits of the whole vocabulary, [rows, vocab] float32, from those of `tokens`, both [rows, tokens].

    Those of other tokens are 1 below the least of a row's.
    """
    own = host_values(logits).astype(np.float32)
    whole = np.repeat(own.min(axis=1, keepdims=True) - 1, vocab_size, axis=1)
    np.put_along_axis(whole, tokens, own, axis=1)
    return whole


def pick_logits(logits: Array, tokens: np.ndarray) -> Array:
    """Return the logits of `tokens` [rows, tokens] from those of the whole vocabulary, [rows, vocab]."""
    return cast("Array", np.take_along_axis(host_values(logits), tokens, axis=1))
