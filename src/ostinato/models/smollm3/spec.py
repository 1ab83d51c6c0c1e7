"""SmolLM3: Llama with some layers, by default every fourth, whose attention has no positions."""

from __future__ import annotations

from ostinato.errors import ModelError
from ostinato.json_io import JsonObject
from ostinato.models.config_json import flag, integer, switched_windows
from ostinato.models.llama.spec import llama_spec
from ostinato.plan.model import ModelSpec

DEFAULT_THETA = 2_000_000.0


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `smollm3` config.json."""
    rotates = _rotating_layers(config)
    bias = flag(config, "attention_bias", False)
    return llama_spec(
        config,
        "smollm3",
        qkv_bias=bias,
        mlp_bias=flag(config, "mlp_bias", False),
        default_tied=True,
        default_theta=DEFAULT_THETA,
        rotates=rotates,
        # Without `layer_types`, layers with positions have no window.
        windows=switched_windows(config, [not is_rotated for is_rotated in rotates], None),
    )


def _rotating_layers(config: JsonObject) -> list[bool]:
    """Return for each layer whether it has positions: 1 in `no_rope_layers` means that it has."""
    num_layers, interval = integer(config, "num_hidden_layers"), integer(config, "no_rope_layer_interval", 4)
    given = config.get("no_rope_layers")
    if given is None:
        return [interval == 0 or (number + 1) % interval != 0 for number in range(num_layers)]
    if not isinstance(given, list) or len(given) < num_layers or any(each not in (0, 1) for each in given):
        raise ModelError(f"config.json has no_rope_layers = {given!r}, which should be 0 or 1 for each of its layers")
    return [each == 1 for each in given[:num_layers]]
