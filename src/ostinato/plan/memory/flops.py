"""The work of a prefill: how many floating-point operations a cached prefix saves."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.plan.model import AttentionSpec, Mamba2Spec, ModelSpec


@dataclass(frozen=True)
class PrefillFlops:
    """Floating-point operations of a prefill. `per_token` is for each token, `per_pair` for each pair of a token
    and one that it attends to: an earlier one or itself."""

    per_token: float
    per_pair: float

    def until(self, tokens: int) -> float:
        """Of the first `tokens` tokens of a prompt."""
        return self.per_token * tokens + self.per_pair * tokens * (tokens + 1) / 2


@dataclass(frozen=True)
class StateCachePlan:
    """What a hit saves. How prefixes are kept is in the settings, how many in the split of the memory."""

    prefill_flops: PrefillFlops


def prefill_flops(model: ModelSpec) -> PrefillFlops:
    """The work of all layers, the drafter's among them, which computes prompts too; embeddings cost none, and only a
    prompt's last token needs the LM head.

    Every parameter that a token meets counts as one multiplication and one addition, of the experts those that
    the router chooses.
    """
    met = sum(layer.parameters - layer.inactive_parameters for layer in model.cached_layers)
    if model.drafter is not None and model.drafter.method == "mtp":
        met += model.drafter.outer_parameters
    scans = sum(_scan_flops(mamba2) for mamba2 in model.state_layers)
    pairs = sum(pair_flops(attention) for attention in model.attention_layers)
    return PrefillFlops(per_token=float(2 * met + scans), per_pair=float(pairs))


def _scan_flops(mamba2: Mamba2Spec) -> int:
    """Per token, of the recurrence in its chunked form (Dao and Gu 2024, arXiv 2405.21060, section 6).

    Each token is added to the state and reads it, and attends, in scores of one group and values of one head
    each, to itself and those before it in its chunk: (chunk_size + 1) / 2 of them on average.
    """
    states = 2 * 2 * mamba2.ssm_state_elements
    return states + (mamba2.chunk_size + 1) * (mamba2.num_groups * mamba2.state_size + mamba2.intermediate_size)


def pair_flops(attention: AttentionSpec) -> int:
    """A product and a sum over each head, for the score and again for the value."""
    return 4 * attention.num_heads * attention.head_dim
