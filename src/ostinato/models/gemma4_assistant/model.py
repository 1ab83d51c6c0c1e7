"""Gemma 4's assistant (model_type `gemma4_assistant`): blocks of Gemma 4 that have queries alone.

It starts from the target's embedding of a token and the target's hidden state before that. Further drafts start from
its own result. All stay at the position of that token, since the target has no keys of drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ostinato.layers.linear import Linear
from ostinato.layers.module import ModelBuilder, Module, QuantizableMatrix
from ostinato.models.base import Assistant, Backbone
from ostinato.models.gemma4_assistant.spec import Gemma4AssistantHyperparameters
from ostinato.models.gemma4_text.model import Gemma4Block, gemma4_block
from ostinato.ops.step_inputs import Array, LayerCache, StepInputs
from ostinato.ops.token_clusters import best_tokens, cluster_tokens, pick_logits, spread_logits
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.model import ModelSpec

if TYPE_CHECKING:
    import numpy as np


class Clusters(Module):
    """Clusters of tokens: a draft's logits are those of the tokens whose clusters have the best centroids.

    `token_ordering` has the tokens of the first cluster, then those of the second, and so on.
    """

    def __init__(self, build: ModelBuilder, spec: ModelSpec, count: int, top: int) -> None:
        super().__init__()
        self.count, self.top = count, top
        self.centroids = Linear(build, spec.hidden_size, count, can_be_quantised=False)
        # Ids are below 2 ** 24, so float32 holds them exactly.
        self.token_ordering = self.declare(build, "token_ordering", spec.vocab_size, role="bias", in_float32=True)
        self.ids: np.ndarray | None = None
        """Tokens of each cluster, [clusters, tokens] int64, after `read_ids`."""

    def read_ids(self) -> None:
        """Read the tokens of the clusters off the loaded weight. ModelError as `cluster_tokens`."""
        self.ids = cluster_tokens(self.token_ordering, self.count)

    def tokens(self, hidden: Array) -> np.ndarray:
        """Return the tokens of each row's best clusters, [rows, hidden] -> [rows, tokens] int64."""
        assert self.ids is not None, "weights are checked when they are loaded"
        return best_tokens(self.centroids(hidden), self.ids, self.top)


class Gemma4Assistant(Assistant):
    """The draft model."""

    integers = ("masked_embedding.token_ordering",)

    def __init__(self, build: ModelBuilder, spec: ModelSpec) -> None:
        hyper: Gemma4AssistantHyperparameters = spec.hyperparameters
        super().__init__(build, spec)
        assert spec.target is not None, "an assistant has a target"
        self.target_size = spec.target.hidden_size
        self.concat = build.ops.concat
        self.pre_projection, self.post_projection = (
            Linear(build, *sizes, can_be_quantised=False)
            for sizes in ((2 * self.target_size, spec.hidden_size), (spec.hidden_size, self.target_size))
        )
        self.clusters: Clusters | None = None
        if hyper.num_clusters:
            self.clusters = Clusters(build, spec, hyper.num_clusters, hyper.top_clusters)
            self.names = {"clusters": "masked_embedding"}

    def make_block(self, layer: LayerSpec) -> Gemma4Block:
        return gemma4_block(self.build, self.spec, layer)

    def forward(  # type: ignore[override]
        self, hidden: Array, embedded: Array, inputs: StepInputs, memory: Sequence[LayerCache]
    ) -> Array:
        backbone: Backbone = self.model
        x = self.pre_projection(self.concat(embedded, hidden))
        return backbone.transform(x, inputs, memory[: len(backbone.layers)])

    def next_hidden(self, hidden: Array) -> Array:
        return self.post_projection(hidden)

    def check_weights(self) -> None:
        if self.clusters is not None:
            self.clusters.read_ids()

    def draft_logits(self, hidden: Array) -> Array:
        """Return the logits of a draft; those of tokens of other clusters are 1 below the least of a row's."""
        if self.clusters is None:
            return self.compute_logits(hidden)
        build = self.build
        head: QuantizableMatrix = self.embedding if self.spec.tied_embeddings else self.lm_head
        if build.rank.of > 1 or head.order is not None:
            return self._picked_logits(hidden, self.clusters)
        chosen = self.clusters.tokens(hidden)
        how: tuple[Any, ...] = ()
        if head.quantization:
            how = (head.weight_scale, head.group_size, build.dtype, head.blocks)
        vectors = build.ops.embedding(build.arrays.of(chosen.reshape(-1)), head.weight, 1.0, *how)
        # As of heads, each row is multiplied by vectors of its own.
        logits = build.ops.linear(hidden.reshape(1, *hidden.shape), vectors)[0]
        return build.arrays.of(spread_logits(logits, chosen, self.spec.vocab_size))

    def _picked_logits(self, hidden: Array, clusters: Clusters) -> Array:
        """Return the same logits from those of all tokens; on the first rank alone if each computes some of them."""
        logits = self.compute_logits(hidden)
        if not self.build.rank.leads:
            return logits
        chosen = clusters.tokens(hidden)
        return self.build.arrays.of(spread_logits(pick_logits(logits, chosen), chosen, self.spec.vocab_size))
