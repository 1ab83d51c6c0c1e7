"""Helpers for the architecture files: sizes, rotary embedding and sliding windows of a config.json.

The rotary embedding has two spellings: `rope_theta`, `rope_scaling` and `partial_rotary_factor` as separate keys, and
one dict `rope_parameters` with all of them. Layers with a window are named in `layer_types`, or each architecture has a
rule for the layers with the one `sliding_window`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ostinato.errors import ModelError
from ostinato.json_io import JsonMapping, JsonObject
from ostinato.plan.layer_specs import AttentionSpec, ExpertsSpec
from ostinato.plan.model import MODEL_DTYPES, ModelSpec
from ostinato.plan.rope import RopeSpec

MAX_LENGTH, MAX_SIZE, MAX_EXPERTS, MAX_LAYERS = 2**48, 2**22, 2**14, 2**10
"""Largest lengths in tokens, sizes, and numbers of experts and layers, that are read.

Larger ones are damage, and take minutes to plan.
"""
_LENGTHS = ("max_position", "window", "length")
"""Parts of the names of lengths."""


def require(config: JsonMapping, name: str) -> object:
    """Return the value of `name`; ModelError if config.json has no such key, or null for it."""
    value = config.get(name)
    if value is None:
        raise ModelError(f"config.json has no {name!r}, which a {config.get('model_type')} model needs")
    return value


def integer(config: JsonMapping, name: str, default: int | None = None, most: int | None = None, least: int = 0) -> int:
    """Return a whole number from `least` to `most`, or to the limit for such values.

    Without a default the key is required; null counts as absent.
    """
    value = _value(config, name, default)
    most = _limit(name) if most is None else most
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise _malformed(name, value, f"a whole number of at least {least}")
    if value > most:
        raise ModelError(f"config.json has a {name} above {most:,}, which no model has")
    return value


def _limit(name: str) -> int:
    """Return the largest value that is read under a name."""
    if "experts" in name:
        return MAX_EXPERTS
    if name in ("num_hidden_layers", "num_layers_per_stack", "depth"):
        return MAX_LAYERS
    return MAX_LENGTH if any(part in name for part in _LENGTHS) else MAX_SIZE


def number(config: JsonMapping, name: str, default: float | None = None) -> float:
    """Return a finite number, as float. Without a default the key is required; null counts as absent."""
    value = _value(config, name, default)
    # No float is beyond the limit, and an integer may be.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise _malformed(name, value, "a finite number")
    return float(value)


def flag(config: JsonMapping, name: str, default: bool | None = None) -> bool:
    """Return True or False. Without a default the key is required. Null is False, as in transformers."""
    value = False if name in config and config[name] is None else _value(config, name, default)
    if not isinstance(value, bool):
        raise _malformed(name, value, "true or false")
    return value


def text(config: JsonMapping, name: str, default: str | None = None) -> str:
    """Return a string. Without a default the key is required; null counts as absent."""
    value = _value(config, name, default)
    if not isinstance(value, str):
        raise _malformed(name, value, "a string")
    return value


def flag_is(config: JsonMapping, name: str, value: bool) -> None:
    """Raise ModelError if a flag that is set has another value."""
    if flag(config, name, value) is not value:
        raise ModelError(f"config.json has {name} = {config[name]!r}; supported: {str(value).lower()}")


def with_defaults(config: JsonMapping, **defaults: int) -> JsonObject:
    """Return the config with these whole numbers under their names if it has none there; null counts as absent."""
    return {**config, **{name: integer(config, name, value) for name, value in defaults.items()}}


def respelled(config: JsonMapping, names: Mapping[str, str]) -> JsonObject:
    """Return the config with the values that it has under other names: `names` are the usual ones, by the others.

    The other name wins, as in transformers.
    """
    return {**config, **{name: config[other] for other, name in names.items() if config.get(other) is not None}}


def layer_kinds(
    config: JsonMapping, kinds: Mapping[str, str], names: tuple[str, ...] = ("layer_types",)
) -> tuple[str, ...] | None:
    """Return the kind of each layer, mapped from the words under the first of `names` that is set; None without any.

    ModelError for a word that `kinds` does not have, and if there is not one word per layer.
    """
    name = next((name for name in names if config.get(name)), None)
    if name is None:
        return None
    words, count = config[name], integer(config, "num_hidden_layers")
    if not isinstance(words, list):
        raise _malformed(name, words, "a list of words")
    unknown = sorted({str(word) for word in words if word not in kinds})
    if unknown:
        raise ModelError(f"config.json has {name} {', '.join(unknown)}; supported: {', '.join(kinds)}")
    if len(words) != count:
        raise ModelError(f"config.json has {len(words)} {name} for num_hidden_layers = {count}")
    return tuple(kinds[word] for word in words)


def time_step_limit(config: JsonMapping) -> tuple[float, float]:
    """Return the range of a state layer's time step; infinity is null, a word, or the dict transformers writes."""
    limit = config.get("time_step_limit")
    if limit is None:
        return 0.0, math.inf
    low, high = map(_maybe_infinite, limit)
    return low, high


def activation(config: JsonMapping, name: str, default: str, supported: tuple[str, ...]) -> str:
    """Return the name of an activation function; ModelError unless it is one of `supported`."""
    value = text(config, name, default)
    if value not in supported:
        raise ModelError(f"config.json has {name} = {value!r}; supported: {', '.join(supported)}")
    return value


HEADS_HAVE_OWN_KEYS = frozenset(
    {
        *("arcee", "cohere2", "granite", "granitemoe", "granitemoe_swa", "granitemoehybrid"),
        *("llama", "olmo3", "olmo_hybrid", "phi3"),
    }
)
"""Architectures in which each head has keys and values of its own if config.json does not mention them.

In transformers the others have a number of their own then, which no published config.json leaves out.
"""


def attention_spec(config: JsonMapping, head_dim: int | None = None) -> AttentionSpec:
    """Return the attention of the usual keys.

    A null for `num_key_value_heads` means as many as heads; `HEADS_HAVE_OWN_KEYS` tells what it means if it is absent.
    `head_dim` is the default for a config.json without one. Without a default, and for null in config.json, it is the
    hidden size divided by the heads.
    """
    num_heads = integer(config, "num_attention_heads")
    if config.get("head_dim", head_dim) is None:
        head_dim = integer(config, "hidden_size") // num_heads
    is_stated = "num_key_value_heads" in config or config.get("model_type") in HEADS_HAVE_OWN_KEYS
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=integer(config, "num_key_value_heads", num_heads if is_stated else None),
        head_dim=integer(config, "head_dim", head_dim),
    )


def top_k(config: JsonMapping, num_experts: int, default: int | None = None) -> int:
    """Return the number of experts that a router chooses; ModelError if the model has fewer."""
    chosen = integer(config, "num_experts_per_tok", default)
    if not 1 <= chosen <= num_experts:
        raise ModelError(f"config.json has num_experts_per_tok = {chosen}, which should be 1 to {num_experts}")
    return chosen


def usual_experts(
    config: JsonMapping,
    num_experts: int,
    chosen: int | None = None,
    width: str = "intermediate_size",
    default_width: int | None = None,
) -> ExpertsSpec:
    """Return the experts of a layer; `width` is the key of their inner size.

    `chosen` and `default_width` are defaults for a config.json without `num_experts_per_tok` and that size.
    """
    router = top_k(config, num_experts, chosen)
    return ExpertsSpec(num_experts, router, integer(config, "hidden_size"), integer(config, width, default_width))


def sparse_layers(config: JsonMapping, num_layers: int) -> list[bool]:
    """Return for each layer whether it has experts (Qwen): every `decoder_sparse_step`-th has, but `mlp_only_layers`.

    ModelError for a step of 0.
    """
    step, dense = integer(config, "decoder_sparse_step", 1, least=1), config.get("mlp_only_layers") or ()
    return [i not in dense and (i + 1) % step == 0 for i in range(num_layers)]


def grouped_top_k(
    config: JsonMapping,
    num_experts: int,
    names: tuple[str, str, str] = ("num_experts_per_tok", "n_group", "topk_group"),
) -> tuple[int, int, int]:
    """Return (experts that a router chooses, groups of experts, groups that it chooses from).

    ModelError if these groups have fewer experts. `names` are the names of the three in config.json.
    """
    of_chosen, of_groups, of_top = names
    groups, top_groups = integer(config, of_groups, 1), integer(config, of_top, 1)
    if groups < 1 or num_experts % groups or (groups > 1 and num_experts < 2 * groups):
        raise ModelError(
            f"config.json has {of_groups} = {groups}, which should part {num_experts} experts into groups of 2 or more"
        )
    if not 1 <= top_groups <= groups:
        raise ModelError(f"config.json has {of_top} = {top_groups}, which should be 1 to {groups}")
    chosen, allowed = integer(config, of_chosen), num_experts // groups * top_groups
    if not 1 <= chosen <= allowed:
        raise ModelError(
            f"config.json has {of_chosen} = {chosen}, which should be 1 to {allowed}, the experts of "
            f"{top_groups} of {groups} groups"
        )
    return chosen, groups, top_groups


def shared_fields(config: JsonMapping, default_tied: bool = False) -> JsonObject:
    """Return the fields of a ModelSpec that every architecture has under the same keys."""
    return {
        "dtype": checkpoint_dtype(config),
        "vocab_size": integer(config, "vocab_size"),
        "hidden_size": integer(config, "hidden_size"),
        "max_position_embeddings": config.get("max_position_embeddings"),
        "tied_embeddings": flag(config, "tie_word_embeddings", default_tied),
        "ssm_state_dtype": config.get("mamba_ssm_cache_dtype"),
    }


def checkpoint_dtype(*configs: JsonMapping) -> str:
    """Return `dtype` or `torch_dtype` of the first config with either, the whole one or a part of it.

    It is float32 without any, as in transformers.
    """
    given = (config.get("dtype") or config.get("torch_dtype") for config in configs)
    dtype = str(next(filter(None, given), "float32")).removeprefix("torch.")
    if dtype not in MODEL_DTYPES:
        raise ModelError(f"config.json has dtype {dtype!r}; the supported ones are {', '.join(MODEL_DTYPES)}")
    return dtype


def part(config: JsonMapping, name: str) -> JsonObject:
    """Return one of the dicts in a config.json."""
    found = config.get(name)
    if not isinstance(found, dict):
        raise ModelError(f"config.json has no {name!r} with the sizes of that part of a {config['model_type']} model")
    return found


def text_of_kind(config: JsonMapping, kind: str) -> JsonObject:
    """Return the text part of a config.json. ModelError if its `model_type` is not `kind`."""
    text = part(config, "text_config")
    found = text.get("model_type", kind)
    if found != kind:
        raise ModelError(f"config.json has a text part of model_type = {found!r}; supported: {kind!r}")
    return text


def spec_of_text(
    config: JsonObject,
    text_spec: Callable[[JsonObject], ModelSpec],
    architecture: str,
    left_out: str | None = None,
    *,
    default_tied: bool = True,
    defaults: JsonMapping | None = None,
) -> ModelSpec:
    """Return what `text_spec` makes of a config's text part, with the whole config's ties, and its dtype if it has one.

    `left_out` says what of the checkpoint is not run. `defaults` are those of the text part, and `default_tied` is that
    of a config.json without `tie_word_embeddings`.
    """
    text = {**(defaults or {}), **part(config, "text_config")}
    text["dtype"] = checkpoint_dtype(config, text)
    # transformers heeds no flag of the text part.
    text["tie_word_embeddings"] = flag(config, "tie_word_embeddings", default_tied)
    return replace(text_spec(text), architecture=architecture, left_out=left_out)


def _maybe_infinite(value: Any) -> float:
    if value is None:
        return math.inf
    try:
        return float(value["__float__"] if isinstance(value, Mapping) else value)
    except (KeyError, TypeError, ValueError) as error:
        raise _malformed("time_step_limit", value, "a number or Infinity") from error


def _value(config: JsonMapping, name: str, default: object) -> Any:
    if default is None:
        return require(config, name)
    value = config.get(name)
    return default if value is None else value


def _malformed(name: str, value: object, expected: str) -> ModelError:
    return ModelError(f"config.json has {name} = {value!r}, which should be {expected}")


DEFAULT_THETA = 10000.0
AXIAL = ("axial", "default")
ROPE_KINDS = ("default", "linear", "llama3", "yarn", "dynamic", "longrope", "proportional", "factors")

_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "dynamic": ("factor",),
    "longrope": (),
    "proportional": (),
    "factors": (),
}
_OPTIONAL = {
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "proportional": ("factor",),
}


def parse_rope(
    config: JsonMapping, head_dim: int, default_partial: float | None = None, default_theta: float = DEFAULT_THETA
) -> RopeSpec:
    """Return the rotary embedding of a model with heads of `head_dim` elements, `default_partial` of them rotated.

    Without `default_partial` the architecture rotates whole heads, and ModelError is raised for parts of them. It is
    also raised for a kind that is not supported, for one that differs between layers, and for a missing factor.
    """
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, Mapping) or any(isinstance(value, Mapping) for value in scaling.values()):
        raise ModelError("config.json gives each kind of layer its own rotary embedding; one for all is supported")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPE_KINDS:
        known = ", ".join(ROPE_KINDS)
        raise ModelError(f"rope type {kind!r} is not supported; the supported ones are {known}")
    merged = {**config, **{name: value for name, value in scaling.items() if value is not None}}
    partial = number(merged, "partial_rotary_factor", 1.0 if default_partial is None else default_partial)
    theta = number(merged, "rope_theta", default_theta)
    parameters: JsonObject = {name: number(scaling, name) for name in _REQUIRED[kind]}
    parameters |= {name: scaling[name] for name in _OPTIONAL.get(kind, ()) if scaling.get(name) is not None}
    original = _original_max_position(config, scaling, kind)
    if kind == "yarn" and "factor" not in parameters:
        parameters["factor"] = integer(config, "max_position_embeddings") / original
    rotary_dim = int(head_dim * partial)
    if not 0 <= partial <= 1:
        raise ModelError(f"config.json has partial_rotary_factor = {partial}, which should be 0 to 1")
    if kind == "proportional":
        rotary_dim, parameters["partial_rotary_factor"] = head_dim, partial
    if default_partial is None and rotary_dim != head_dim:
        raise ModelError(
            f"config.json rotates {rotary_dim} elements of heads of {head_dim} (partial_rotary_factor); such a model "
            "rotates all of them"
        )
    if kind == "factors":
        parameters["factors"] = _factors(scaling, rotary_dim // 2)
    if kind == "longrope":
        parameters = {name: _factors(scaling, rotary_dim // 2, name) for name in ("short_factor", "long_factor")}
        factor = number(scaling, "factor", integer(config, "max_position_embeddings") / max(original, 1))
        grown = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
        parameters["attention_factor"] = number(scaling, "attention_factor", grown)
    return RopeSpec(kind, theta, rotary_dim, original, parameters)


def ropes_by_kind(config: JsonMapping, defaults: Mapping[str, JsonObject]) -> Mapping[str, JsonObject]:
    """Return `rope_parameters` by kind of layer, `defaults` without them. ModelError for other forms of them."""
    given = config.get("rope_parameters") or defaults
    if not isinstance(given, Mapping) or not set(given) <= {FULL, SLIDING}:
        raise ModelError(
            f"config.json has rope_parameters = {given!r}; supported: a dict for each of {FULL}, {SLIDING}"
        )
    return given


def axial_theta(vision: JsonMapping, default: float) -> float:
    """Return the theta of an encoder's rotary embedding by rows and columns, in whose older name it is `default`.

    ModelError for other kinds.
    """
    rope = vision.get("rope_scaling") or vision.get("rope_parameters") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in AXIAL:
        raise ModelError(f"config.json has rope_type = {kind!r} for the encoder; supported: {', '.join(AXIAL)}")
    return number(rope, "rope_theta", number(vision, "rope_theta", default))


@dataclass(frozen=True)
class SiglipHyperparameters:
    """Hyperparameters of `layers.vision.Siglip`, besides the VisionSpec."""

    norm_eps: float
    activation: str


def siglip_sizes(vision: JsonMapping) -> JsonObject:
    """Return the fields of a VisionSpec that SigLIP has under the usual keys, with its usual sizes by default."""
    return {
        "hidden_size": integer(vision, "hidden_size", 768),
        "num_layers": integer(vision, "num_hidden_layers", 12),
        "num_heads": integer(vision, "num_attention_heads", 12),
        "intermediate_size": integer(vision, "intermediate_size", 3072),
        "patch_size": integer(vision, "patch_size", 16),
        "in_channels": integer(vision, "num_channels", 3),
    }


def siglip_hyperparameters(vision: JsonMapping) -> SiglipHyperparameters:
    """Return the hyperparameters from the part of a config.json on the encoder."""
    return SiglipHyperparameters(
        norm_eps=number(vision, "layer_norm_eps", 1e-6),
        activation=activation(vision, "hidden_act", "gelu_pytorch_tanh", ("gelu_pytorch_tanh", "gelu")),
    )


def rope_pair(
    config: JsonMapping,
    head_dim: int,
    theta: float,
    local_theta: float,
    local_name: str | None = None,
    default_partial: float | None = None,
) -> tuple[RopeSpec, RopeSpec]:
    """Return the rotary embeddings of layers over the whole context and of those with a window.

    `rope_parameters` has a dict for each. In the older spelling `rope_theta` and `rope_scaling` are the first's, and
    `local_name` is the key of the other's theta, if it has one. The thetas are defaults for a config.json without them;
    `default_partial` is that of `parse_rope`.
    """
    given = ropes_by_kind(config, {})
    plain = {name: value for name, value in config.items() if name not in ("rope_parameters", "rope_scaling")}
    of_all = rope_parameters_of_kind({**(given.get(FULL) or {}), **(config.get("rope_scaling") or {})})
    local = rope_parameters_of_kind(given.get(SLIDING) or {})
    local_plain = {**plain, "rope_theta": config.get(local_name) if local_name else None}
    return (
        parse_rope({**plain, "rope_parameters": of_all}, head_dim, default_partial, theta),
        parse_rope({**local_plain, "rope_parameters": local}, head_dim, default_partial, local_theta),
    )


def rope_parameters_of_kind(parameters: JsonMapping) -> JsonObject:
    """Return the rotary embedding of a kind of layers without `truncate`, which transformers reads for one of all."""
    return {name: value for name, value in parameters.items() if name != "truncate"}


def _factors(scaling: JsonMapping, count: int, name: str = "factors") -> list[float]:
    """Return the frequencies' divisors, as in GGUF files and LongRoPE. ModelError unless each has one above 0."""
    factors = scaling.get(name)
    if not isinstance(factors, list) or len(factors) != count or not all(factor > 0 for factor in factors):
        raise ModelError(f"the rotary embedding has {name} = {factors!r}, which should be {count} numbers above 0")
    return factors


def with_sections(rope: RopeSpec, scaling: JsonMapping, default: tuple[int, int, int]) -> RopeSpec:
    """Return `rope` with the sections of time, height and width from `scaling`, config.json's dict on it.

    ModelError if there are not three sections, and if they are not interleaved.
    """
    if not flag(scaling, "mrope_interleaved", True):
        raise ModelError("config.json has mrope_interleaved = false; supported: true")
    given = scaling.get("mrope_section")
    sections = default if given is None else given
    is_list = isinstance(sections, list | tuple)
    if not is_list or len(sections) != 3 or not all(type(size) is int and size >= 0 for size in sections):
        raise ModelError(f"config.json has mrope_section = {sections!r}, which should be three whole numbers")
    time, height, width = sections
    return replace(rope, sections=(time, height, width))


def _original_max_position(config: JsonMapping, scaling: Mapping[str, object], kind: str) -> int:
    """Return the length that unscaled frequencies were trained for; 0 if the kind needs none and none is given."""
    if kind in ("llama3", "yarn", "longrope"):
        # As in transformers, the outer key overrides the one in the scaling's dict.
        for source in (config, scaling):
            if source.get("original_max_position_embeddings") is not None:
                return integer(source, "original_max_position_embeddings")
        return integer(config, "max_position_embeddings")
    if kind == "dynamic":
        return integer(config, "max_position_embeddings")
    return integer(config, "max_position_embeddings", 0)


FULL, SLIDING = "full_attention", "sliding_attention"


def layer_windows(config: JsonMapping, slides: Sequence[bool], window: int | None) -> tuple[int | None, ...]:
    """Return the window of each layer, None for layers that see all positions.

    The sliding layers are those that `layer_types` names, or else those of `slides`. They see the last `sliding_window`
    positions, their own included. `window` is the default for a config.json without `sliding_window`. A window that is
    no shorter than the context is None.

    ModelError for other kinds of layers, and for sliding layers without a window.
    """
    kinds = window_kinds(config)
    slides = slides if kinds is None else [kind == SLIDING for kind in kinds]
    if not any(slides):
        return (None,) * len(slides)
    given = config.get("sliding_window", window)
    if given is None:
        raise ModelError(
            f"config.json names layers with {SLIDING}, and no sliding_window; it should be a whole number of at least 1"
        )
    size = integer({"sliding_window": given}, "sliding_window", least=1)
    longest = config.get("max_position_embeddings")
    if isinstance(longest, int) and size >= longest:
        return (None,) * len(slides)
    return tuple(size if is_on_layer else None for is_on_layer in slides)


def window_kinds(config: JsonMapping) -> tuple[str, ...] | None:
    """Return `layer_types`, if it is set: `FULL` or `SLIDING` for each layer."""
    return layer_kinds(config, {FULL: FULL, SLIDING: SLIDING})


def sliding_layers(config: JsonMapping, pattern: int) -> list[bool]:
    """Return for each layer whether it has a window: by `layer_types`, or all but every `sliding_window_pattern`-th.

    `pattern` is the default for a config.json without either. ModelError for a pattern of 0.
    """
    num_layers = integer(config, "num_hidden_layers")
    kinds = window_kinds(config)
    if kinds is not None:
        return [kind == SLIDING for kind in kinds]
    pattern = integer(config, "sliding_window_pattern", pattern, least=1)
    return [(i + 1) % pattern != 0 for i in range(num_layers)]


def soft_cap(config: JsonMapping, name: str) -> float | None:
    """Return the cap of scores or logits, `name` in config.json: x becomes cap * tanh(x / cap). None if it is null.

    ModelError unless it is above 0.
    """
    if config.get(name) is None:
        return None
    value = number(config, name)
    if not value > 0:
        raise ModelError(f"config.json has {name} = {value}; it should be above 0, or null for no cap")
    return value
