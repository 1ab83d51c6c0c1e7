"""Youtu-LLM: multi-head latent attention with positions in every layer, then a gated MLP."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.errors import ModelError
from ostinato.json_io import JsonObject
from ostinato.models.config_json import activation, flag, flag_is, integer, number, shared_fields, with_defaults
from ostinato.models.kimi_linear.spec import latent_attention, latent_rope
from ostinato.plan.layer_specs import LatentSizes, LayerSpec
from ostinato.plan.model import ModelSpec

QUERY_RANK, LONGEST = 1536, 131072
"""Defaults of a config.json without these values."""


@dataclass(frozen=True)
class YoutuHyperparameters:
    """Hyperparameters of models/youtu/model.py, besides the layers."""

    latent: LatentSizes
    query_rank: int | None
    """Size of the queries' latent; None if they are projected without one."""
    has_neighbours: bool
    """True if the rows that positions rotate together are neighbours in the checkpoint."""
    intermediate_size: int
    norm_eps: float


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `youtu` config.json.

    ModelError for biases, and for a `head_dim` that is not the rotated part of a key, which transformers takes it for.
    """
    activation(config, "hidden_act", "silu", ("silu",))
    flag_is(config, "attention_bias", False)
    config = with_defaults(config, max_position_embeddings=LONGEST)
    latent, attention = latent_attention(config, rotates=True)
    if integer(config, "head_dim", latent.shared) != latent.shared:
        raise ModelError(
            f"config.json has head_dim = {config['head_dim']}, and a youtu model rotates qk_rope_head_dim = "
            f"{latent.shared} elements of a key; they should be equal"
        )
    given = config.get("q_lora_rank", QUERY_RANK)
    layer = LayerSpec("attention", attention)
    return ModelSpec(
        architecture="youtu",
        **shared_fields(config, default_tied=True),
        layers=(layer,) * integer(config, "num_hidden_layers"),
        rope=latent_rope(config, latent),
        sharded_dims=("intermediate_size",),
        hyperparameters=YoutuHyperparameters(
            latent=latent,
            query_rank=None if given is None else integer({"q_lora_rank": given}, "q_lora_rank"),
            has_neighbours=flag(config, "rope_interleave", True),
            intermediate_size=integer(config, "intermediate_size"),
            norm_eps=number(config, "rms_norm_eps", 1e-6),
        ),
    )
