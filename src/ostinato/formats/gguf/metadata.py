"""A GGUF file's metadata under its architecture's name, and its position scaling. Imports no torch."""

from __future__ import annotations

from typing import Any

from ostinato.errors import ModelError
from ostinato.formats.gguf.reader import Header
from ostinato.formats.gguf.tensor_names import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS
from ostinato.json_io import JsonObject


class Metadata:
    """The values of a file under its architecture's name, and the shapes of its tensors."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self._values = header.metadata
        self.architecture = self.text("general.architecture")

    def text(self, name: str) -> str:
        value = self._values.get(name)
        if not isinstance(value, str):
            raise ModelError(f"{self.header.path} has {name} = {value!r}, which should be a text")
        return value

    def optional(self, name: str) -> Any:
        return self._values.get(f"{self.architecture}.{name}")

    def required(self, name: str) -> Any:
        value = self.optional(name)
        if value is None:
            raise ModelError(f"{self.header.path} has no {self.architecture}.{name}")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.optional(name) if default is not None else self.required(name)
        if value is None and default is not None:
            return default
        if type(value) is not int:
            raise self._malformed(name, value, "one whole number")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a float32 as the shortest decimal with its value, which is what the model's author wrote."""
        value = self.optional(name) if default is not None else self.required(name)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float):
            raise self._malformed(name, value, "one number")
        import numpy as np  # imported late: a third of a plan's imports, needed only for such files

        return float(str(np.float32(value)))

    def numbers(self, name: str) -> list[float]:
        """Return a list of numbers, each as `number` returns it."""
        import numpy as np  # imported late: a third of a plan's imports, needed only for such files

        values = np.asarray(self.required(name))
        if values.dtype.kind not in "iuf" or values.ndim != 1:
            raise self._malformed(name, values.tolist(), "a list of numbers")
        return [float(str(value)) for value in values]

    def largest(self, name: str) -> int:
        """Return the largest of whole numbers, one for each layer."""
        import numpy as np  # imported late: a third of a plan's imports, needed only for such files

        values = np.asarray(self.required(name))
        if values.dtype.kind not in "iu" or values.shape != (self.num_layers,):
            raise self._malformed(name, values.tolist(), f"{self.num_layers} whole numbers")
        return int(values.max(initial=0))

    def of_layers(self, name: str, default: int | None = None) -> list[int]:
        """Return a whole number or a truth value for each layer; a single one is that of all layers."""
        import numpy as np  # imported late: a third of a plan's imports, needed only for such files

        found = self.required(name) if default is None else self.optional(name)
        values = np.asarray(default if found is None else found)
        if values.dtype.kind not in "biu" or values.shape not in ((), (self.num_layers,)):
            raise self._malformed(name, values.tolist(), f"{self.num_layers} whole numbers")
        return [int(value) for value in np.broadcast_to(values, (self.num_layers,))]

    def _malformed(self, name: str, value: object, expected: str) -> ModelError:
        return ModelError(f"{self.header.path} has {self.architecture}.{name} = {value!r}, which should be {expected}")

    @property
    def norm_eps(self) -> float:
        """Epsilon of RMS norms, also where config.json calls them layer norms (Nemotron-H)."""
        of_layer_norms = "attention.layer_norm_epsilon"
        is_rms = self.optional("attention.layer_norm_rms_epsilon") is not None or self.optional(of_layer_norms) is None
        return self.number("attention.layer_norm_rms_epsilon" if is_rms else of_layer_norms)

    @property
    def num_layers(self) -> int:
        """Number of layers without those of a prediction head, which a file counts as blocks."""
        blocks, of_head = self.integer("block_count"), self.num_head_layers
        if not 0 <= of_head <= blocks:
            raise self._malformed("nextn_predict_layers", of_head, f"some of its {blocks} blocks")
        return blocks - of_head

    @property
    def num_head_layers(self) -> int:
        return self.integer("nextn_predict_layers", 0)

    def has(self, *inner: str) -> bool:
        """Return whether any layer has any of the tensors."""
        return any(self.layer_with(each) is not None for each in inner)

    def layer_with(self, inner: str) -> int | None:
        """Return the first layer that has the tensor, or None."""
        layers = range(min(self.num_layers, len(self.header.tensors)))
        return next((i for i in layers if f"blk.{i}.{inner}" in self.header.tensors), None)

    def kinds(self, **tensors: str) -> list[str]:
        """Return each layer's kind: the first whose tensor it contains. ModelError for a layer without any."""
        if self.num_layers > len(self.header.tensors):
            raise ModelError(
                f"{self.header.path} says {self.num_layers} layers; it has {len(self.header.tensors)} tensors"
            )
        found = []
        for i in range(self.num_layers):
            kind = next((kind for kind, inner in tensors.items() if f"blk.{i}.{inner}" in self.header.tensors), None)
            if kind is None:
                raise ModelError(f"{self.header.path}: layer {i} is none of {', '.join(tensors)}, by its tensors")
            found.append(kind)
        return found

    def rows(self, inner: str, default: int = 0) -> int:
        """Return the rows of each matrix of a tensor, in the first layer that has the tensor."""
        layer = self.layer_with(inner)
        if layer is None:
            return default
        shape = self.header.tensors[f"blk.{layer}.{inner}"].shape
        return shape[-2] if len(shape) > 1 else default


SCALINGS = ("none", "linear", "yarn")
_YARN = ("beta_fast", "beta_slow")
"""Names in a config.json; in the metadata they have the prefix `yarn_`."""
_REFUSED = tuple(
    f"rope.scaling.{name}" for name in ("attn_factor", "yarn_attn_factor", "yarn_log_multiplier", "yarn_ext_factor")
)
"""Settings that must be 1."""


def rope_scaling(metadata: Metadata) -> JsonObject | None:
    """Return the position scaling, as in a config.json. Raises ModelError for what is not implemented."""
    kind = metadata.optional("rope.scaling.type") or "none"
    path = metadata.header.path
    if LONG_FACTORS in metadata.header.tensors:
        return {
            "rope_type": "longrope",
            "long_factor": _factors(metadata, LONG_FACTORS),
            "short_factor": _factors(metadata, SHORT_FACTORS),
            "original_max_position_embeddings": metadata.integer("rope.scaling.original_context_length"),
            "attention_factor": metadata.number("rope.scaling.attn_factor", 1.0),
        }
    if kind not in SCALINGS:
        raise ModelError(f"{path} has rope.scaling.type = {kind!r}; supported: {', '.join(SCALINGS)}")
    if ROPE_FACTORS in metadata.header.tensors:
        if kind != "none":
            raise ModelError(f"{path} scales its positions twice, by {ROPE_FACTORS} and rope.scaling.type = {kind!r}")
        return {"rope_type": "factors", "factors": _factors(metadata, ROPE_FACTORS)}
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": metadata.number("rope.scaling.factor")}
    original = metadata.optional("rope.scaling.original_context_length")
    if original is not None:
        scaling["original_max_position_embeddings"] = metadata.integer("rope.scaling.original_context_length")
    if kind == "yarn":
        for name in _REFUSED:
            if metadata.optional(name) not in (None, 1.0):
                raise ModelError(f"{path} has {name} = {metadata.optional(name)!r}; supported: 1")
        given = (name for name in _YARN if metadata.optional(f"rope.scaling.yarn_{name}") is not None)
        scaling |= {name: metadata.number(f"rope.scaling.yarn_{name}") for name in given}
    return scaling


def _factors(metadata: Metadata, name: str) -> list[float]:
    """Return the divisors of the frequencies that a tensor has. ModelError unless it is a vector of F32."""
    path, factors = metadata.header.path, metadata.header.tensors.get(name)
    if factors is None:
        raise ModelError(f"{path} has no {name}, which LongRoPE needs")
    if factors.type.name != "F32" or len(factors.shape) != 1:
        raise ModelError(f"{path} has {name} of type {factors.type.name}; it should be a vector of F32")
    import numpy as np  # imported late: a third of a plan's imports, needed only for such files

    values = np.fromfile(factors.file, "<f4", factors.num_elements, offset=factors.begin)
    return [float(value) for value in values]
