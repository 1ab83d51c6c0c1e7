"""Pooling for an embedding, chunk by chunk, and the vector that it becomes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np

from ostinato.errors import Remedy, RequestError
from ostinato.models.pooling import PoolingKind, load_pooling
from ostinato.sampling.params import SamplingParams
from ostinato.setting_names import plain_numbers

POOLING_PARAMS = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
"""Sampling parameters of a request for an embedding: the step that ends its prompt ends it."""


class HiddenStatePooler:
    """The last hidden state of a prompt, or the sum of all hidden states."""

    def __init__(self, kind: PoolingKind) -> None:
        self.kind = kind
        self._sum: np.ndarray | None = None
        self._count = 0

    def add(self, vector: np.ndarray, start: int, count: int) -> None:
        """Add a vector of [hidden] float64 for the tokens at positions `start` to `start + count - 1`.

        It is the sum over these tokens for the kind `mean`, else the last hidden state.
        """
        if self.kind == "last" or start == 0:  # a preempted request starts again
            self._sum, self._count = np.zeros(vector.shape, np.float64), 0
        assert self._sum is not None
        assert self.kind == "last" or start == self._count, "every token is counted once, in order"
        self._sum += vector
        self._count += 1 if self.kind == "last" else count

    def vector(self) -> np.ndarray:
        """Return the pooled vector, [hidden] float32."""
        assert self._sum is not None, "the whole prompt is computed"
        return (self._sum / self._count).astype(np.float32)


def finish_embedding(vector: np.ndarray, normalize: bool, dimensions: int | None = None) -> np.ndarray:
    """Return the first `dimensions` elements of [hidden] float32, of length 1 if `normalize`.

    A vector of zeros stays one. Raises ValueError if an element is not finite.
    """
    if not np.isfinite(vector).all():
        raise ValueError("the model gave a hidden state that is not finite")
    vector = vector[:dimensions].astype(np.float64)
    length = float(np.linalg.norm(vector))
    if normalize and length:
        vector = vector / length
    return vector.astype(np.float32)


@dataclass(frozen=True)
class EmbeddingOptions:
    """Settings for the vectors of a request."""

    kind: PoolingKind
    normalize: bool
    dimensions: int | None

    @classmethod
    def resolve(
        cls, directory: Path, hidden_size: int, kind: PoolingKind | None, normalize: bool | None, dimensions: int | None
    ) -> EmbeddingOptions:
        """Return the pooling from the request, else from the checkpoint's configuration in `directory`.

        Raises RequestError for an unknown kind, and for dimensions that a vector of [hidden_size] does not have;
        ModelError if the checkpoint asks for what is not implemented.
        """
        if kind is None or normalize is None:
            of_checkpoint = load_pooling(directory)
            kind = of_checkpoint.kind if kind is None else kind
            normalize = of_checkpoint.normalize if normalize is None else normalize
        normalize, dimensions = plain_numbers(normalize), plain_numbers(dimensions)
        if not isinstance(kind, str) or kind not in get_args(PoolingKind):
            raise RequestError(f"pooling {kind!r} should be {' or '.join(get_args(PoolingKind))}")
        if not isinstance(normalize, bool):
            raise RequestError(f"normalize {normalize!r} should be True or False")
        if dimensions is not None and not (type(dimensions) is int and 1 <= dimensions <= hidden_size):
            message = f"dimensions {dimensions!r} should be from 1 to {hidden_size}, the model's hidden size"
            raise RequestError(message, [Remedy("dimensions", hidden_size)])
        return cls(kind, normalize, dimensions)

    def vector(self, pooled: np.ndarray | None, error: Exception | None = None) -> np.ndarray:
        """Return the embedding of a prompt from the engine's pooled vector. Raises `error`, which ended the request."""
        if error is not None:
            raise error
        assert pooled is not None, "an embedding was asked for"
        return finish_embedding(pooled, self.normalize, self.dimensions)
