"""Pooling for an embedding, chunk by chunk, and the vector that it becomes.

The files of sentence-transformers next to the weights describe a checkpoint's pooling: one vector per text.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from ostinato.errors import ModelError, Remedy, RequestError
from ostinato.files import find_in_checkpoint
from ostinato.json_io import read_json_value
from ostinato.sampling.params import SamplingParams
from ostinato.setting_names import plain_numbers

PoolingKind = Literal["last", "mean"]
_MODES = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}
"""Pooling kinds by the names of the modes in 1_Pooling/config.json."""


@dataclass(frozen=True)
class Pooling:
    """Pooling of the final normed hidden states of a text: the last or the mean, of length 1 if `normalize`."""

    kind: PoolingKind = "last"
    normalize: bool = True


def load_pooling(directory: Path) -> Pooling:
    """Return the pooling of modules.json and the files that it names, or the defaults if a checkpoint has none.

    ModelError for pooling that is not implemented, and for damaged files.
    """
    modules = read_json_value(directory / "modules.json")
    if modules is None:
        return Pooling()
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelError("modules.json should be a list of objects")
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    unknown = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
    if unknown or kinds[:2] != ["Transformer", "Pooling"] or len(kinds) != len(set(kinds)):
        raise ModelError(
            f"modules.json makes embeddings by {', '.join(kinds)}; implemented are Transformer, Pooling and, behind "
            "them, Normalize"
        )
    name = f"{Path(str(modules[1].get('path', ''))).name}/config.json"
    path = find_in_checkpoint(directory, name)
    if path is None:
        raise ModelError(f"modules.json names {name}, which is not there")
    return Pooling(_kind(read_json_value(path), name), "Normalize" in kinds)


def _kind(config: object, name: str) -> Any:
    if not isinstance(config, dict):
        raise ModelError(f"{name} should be an object")
    # Newer files have one name, older ones a flag for each mode.
    prefix = "pooling_mode_"
    modes = [key.removeprefix(prefix) for key, value in config.items() if key.startswith(prefix) and value is True]
    given = config.get("pooling_mode")
    if given is not None:
        modes = list(map(str, given)) if isinstance(given, list) else [str(given)]
    if len(modes) != 1 or modes[0] not in _MODES:
        asked = " and ".join(modes) or "nothing"
        raise ModelError(f"{name} asks to pool by {asked}; implemented are lasttoken and mean")
    return _MODES[modes[0]]


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
