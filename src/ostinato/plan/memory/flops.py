"""The work of a prefill: how many floating-point operations a cached prefix saves."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.ops.work import pair_flops
from ostinato.plan.model import ModelSpec


@dataclass(frozen=True)
class PrefillFlops:
    """Floating-point operations of a prefill.

    `per_token` is for each token, `per_pair` for each pair of a token and one that it attends to: an earlier one or
    itself.
    """

    per_token: float
    per_pair: float

    def until(self, tokens: int) -> float:
        """Return the operations of the first `tokens` tokens of a prompt."""
        return self.per_token * tokens + self.per_pair * tokens * (tokens + 1) / 2


@dataclass(frozen=True)
class StateCachePlan:
    """Work that a hit saves. The settings say how prefixes are kept, the memory split how many."""

    prefill_flops: PrefillFlops


def prefill_flops(model: ModelSpec) -> PrefillFlops:
    """Return the work of all layers, including the drafter's, which computes prompts too.

    Embeddings cost none, and only a prompt's last token needs the LM head. Every parameter that a token uses counts as
    one multiplication and one addition; of the experts, those that the router chooses.
    """
    met = sum(layer.used_parameters - layer.inactive_parameters for layer in model.cached_layers)
    if model.drafter is not None and model.drafter.method == "mtp":
        met += model.drafter.outer_parameters
    scans = sum(mixer.scan_flops for mixer in model.state_layers)
    pairs = sum(pair_flops(layer.num_heads, layer.head_dim) for layer in model.attention_layers)
    return PrefillFlops(per_token=float(2 * met + scans), per_pair=float(pairs))
