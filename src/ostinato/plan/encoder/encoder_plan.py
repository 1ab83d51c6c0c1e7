"""EncoderPlan from settings and limits: whether the encoder has graphs, their sizes, and the size of its cache."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from ostinato.config import EngineConfig
from ostinato.config_fields import BUDGETS
from ostinato.errors import ConfigError, Remedy
from ostinato.ops.operations import ENCODER_OPS, GraphBackend
from ostinato.plan.decision import Decision, no_effect
from ostinato.plan.encoder.budgets import ITEMS, EncoderBudgets, doubling, encoder_budgets
from ostinato.plan.encoder.memory import EncoderMemory, cell_bytes, encoder_graph_bytes, encoding_bytes
from ostinato.plan.kernels import KernelChoice, ops_of
from ostinato.plan.layer_specs import VisionSpec
from ostinato.plan.limits import Limits
from ostinato.plan.model import ModelSpec

EncoderGraphMode = Literal["none", "auto", "always"]

MODE = "encoder_graph_mode"
CACHED_ITEMS = 4
"""Number of the largest images that the encoder cache holds by default."""
CACHE_SHARE = 8
"""Divisor of the cache's memory that bounds this default, beyond one image."""
SETTINGS = (MODE, BUDGETS, ITEMS, "encoder_cache_tokens", "video_pruning_rate", "allow_remote_images")


@dataclass(frozen=True)
class EncoderPlan:
    """Plan of a vision encoder. Tokens are output tokens; an item is one image, or one temporal patch of a video.

    Graphs are captured for `token_budgets`, with up to `max_items_per_batch` items each; there are none if `graph_mode`
    is `none`. `max_item_tokens` is the size of the largest item that is served, which runs eagerly if no budget holds
    it. With `auto`, a budget runs eagerly if its graph is measured to be slower; with `always`, none does. `reason`
    says why it is the one or the other.

    The encoder cache has `num_cells` cells of `cell_bytes` each, the null one included, one per token. `graph_bytes` is
    the memory of graphs with their buffers, and `activation_bytes` that of encoding `most_tokens` at a time eagerly.
    """

    token_budgets: tuple[int, ...]
    max_items_per_batch: int
    max_item_tokens: int
    graph_mode: EncoderGraphMode
    reason: str
    backend: GraphBackend
    num_cells: int
    cell_bytes: int
    cache_bytes: int
    graph_bytes: int
    activation_bytes: int
    video_pruning_rate: float
    whole_images: bool
    """True if a step computes all tokens of an image, since they see each other in both directions."""

    @property
    def most_tokens(self) -> int:
        """Largest number of tokens encoded at a time, of the largest image or of several in the largest budget."""
        return max((self.max_item_tokens, *self.token_budgets))


@dataclass(frozen=True)
class EncoderChoice:
    """Choices about the encoder that do not depend on the limits.

    `mode` is that of its graphs, as `EncoderPlan.graph_mode`. The given settings are None where they are open.
    """

    vision: VisionSpec
    dtype: str
    mode: EncoderGraphMode
    reason: str
    backend: GraphBackend
    native: Collection[str]
    triton: Collection[str]
    threads: int
    token_budgets: tuple[int, ...] | None
    max_items_per_batch: int | None
    cache_tokens: int | None
    video_pruning_rate: float
    row_tokens: int
    """Tokens of each decoding request that may share a step with a whole image; 0 if a step may cut images."""

    @property
    def sees_all(self) -> bool:
        """True if attention is masked over all patches, as in `encoding_bytes`."""
        return self.backend == "cuda" and self.dtype == "float32" and "encoder_attention" not in self.triton


def choose_encoder(
    config: EngineConfig,
    model: ModelSpec,
    dtype: str,
    kernels: Mapping[str, KernelChoice],
    backend: GraphBackend,
    threads: int,
) -> EncoderChoice | None:
    """Return the encoder's choices; None without images. ConfigError if graphs must be used and there can be none."""
    if model.vision is None:
        return None
    mode, reason = _graph_mode(config, kernels, backend)
    return EncoderChoice(
        vision=model.vision,
        dtype=dtype,
        mode=mode,
        reason=reason,
        backend=backend,
        native=ops_of(kernels, "native"),
        triton=ops_of(kernels, "triton"),
        threads=threads,
        token_budgets=config.encoder_token_budgets,
        max_items_per_batch=config.encoder_max_items_per_batch,
        cache_tokens=config.encoder_cache_tokens,
        video_pruning_rate=config.video_pruning_rate,
        row_tokens=1 + config.num_speculative_tokens if model.vision.is_bidirectional else 0,
    )


def max_item_tokens(choice: EncoderChoice, limits: Limits) -> int:
    """Return the output tokens of the largest image that is served: a step encodes it whole, and a request holds it.

    If a step computes it whole too, it has room beside all requests that decode.
    """
    room = limits.max_num_batched_tokens - limits.max_num_seqs * choice.row_tokens
    return max(1, min(room, limits.max_model_len))


def what_limits_items(limits: Limits, served: int) -> str:
    """Return the names of the settings that determine `max_item_tokens`, which is `served`."""
    values = {"max_num_batched_tokens": limits.max_num_batched_tokens, "max_model_len": limits.max_model_len}
    names = [name for name, value in values.items() if value == served]
    return " and ".join(names) or "max_num_batched_tokens, less the tokens of max_num_seqs"


def choose_budgets(choice: EncoderChoice, limits: Limits) -> EncoderBudgets:
    """Return the budgets for these limits, whether or not there are graphs. ConfigError as `encoder_budgets`."""
    return encoder_budgets(
        min_budget=choice.vision.smallest_item,
        max_budget=max_item_tokens(choice, limits),
        token_budgets=choice.token_budgets,
        max_items_per_batch=choice.max_items_per_batch,
    )


def encoder_activations(choice: EncoderChoice, limits: Limits) -> int:
    """Return the peak bytes of the largest pack when it runs eagerly: the largest image, or a full budget."""
    tokens = max((max_item_tokens(choice, limits), *_graph_budgets(choice, limits)))
    return encoding_bytes(
        choice.vision,
        choice.dtype,
        tokens,
        native=choice.native,
        triton=choice.triton,
        threads=choice.threads,
        sees_all=choice.sees_all,
    )


def encoder_memory(choice: EncoderChoice, limits: Limits, cache_tokens: int | None = None) -> EncoderMemory:
    """Return the bytes of the graphs, and of a cache of `cache_tokens` tokens.

    By default the cache has the given number of tokens, or the minimum.
    """
    tokens = min_cache_tokens(choice, limits) if cache_tokens is None else cache_tokens
    budgets = _graph_budgets(choice, limits)
    # No pack has more images than tokens.
    items = max(budgets, default=0)
    graphs = encoder_graph_bytes(
        choice.vision,
        choice.dtype,
        budgets,
        items,
        backend=choice.backend,
        triton=choice.triton,
        sees_all=choice.sees_all,
    )
    return EncoderMemory(graphs, (tokens + 1) * cell_bytes(choice.vision, choice.dtype))


def min_cache_tokens(choice: EncoderChoice, limits: Limits) -> int:
    """Return the given cache tokens; else those of the largest image, which is the minimum of a cache."""
    return choice.cache_tokens or max_item_tokens(choice, limits)


def max_cache_tokens(choice: EncoderChoice, limits: Limits, room: int) -> int:
    """Return the cache tokens that are wanted if `room` bytes are left for blocks, slots and this cache."""
    least = min_cache_tokens(choice, limits)
    if choice.cache_tokens is not None:
        return least
    share = room // CACHE_SHARE // cell_bytes(choice.vision, choice.dtype) - 1
    return max(least, min(CACHED_ITEMS * least, share))


def plan_encoder(choice: EncoderChoice, limits: Limits, cache_tokens: int) -> EncoderPlan:
    """Return the plan, with a cache of `cache_tokens` tokens. ConfigError as `encoder_budgets`."""
    budgets = choose_budgets(choice, limits)
    memory = encoder_memory(choice, limits, cache_tokens)
    return EncoderPlan(
        token_budgets=budgets.token_budgets if choice.mode != "none" else (),
        max_items_per_batch=budgets.max_items_per_batch,
        max_item_tokens=max_item_tokens(choice, limits),
        graph_mode=choice.mode,
        reason=choice.reason,
        backend=choice.backend,
        num_cells=cache_tokens + 1,
        cell_bytes=cell_bytes(choice.vision, choice.dtype),
        cache_bytes=memory.cache,
        graph_bytes=memory.graphs,
        activation_bytes=encoder_activations(choice, limits),
        video_pruning_rate=choice.video_pruning_rate,
        whole_images=choice.vision.is_bidirectional,
    )


def encoder_decisions(
    config: EngineConfig, model: ModelSpec, limits: Limits, plan: EncoderPlan | None
) -> list[Decision]:
    """Return the decisions on changed values, on settings without effect, and on images that are not served."""
    if plan is None or model.vision is None:
        idle = [name for name in SETTINGS if config.is_given(name) and getattr(config, name) != _default(name)]
        return [no_effect(config, name, "the model takes text alone") for name in idle]
    decisions = []
    if plan.graph_mode != config.encoder_graph_mode:
        decisions.append(Decision(MODE, config.encoder_graph_mode, plan.graph_mode, plan.reason))
    if plan.graph_mode == "none":
        idle = [name for name in (BUDGETS, ITEMS) if config.is_given(name)]
        decisions += [no_effect(config, name, "the encoder has no graphs") for name in idle]
    largest = plan.max_item_tokens
    above = [budget for budget in plan.token_budgets if budget > largest]
    if above:
        reason = (
            f"kept as given, though no image of more than {largest} tokens is served "
            f"({what_limits_items(limits, largest)}): larger graphs are for several images at once"
        )
        decisions.append(Decision(BUDGETS, list(plan.token_budgets), list(plan.token_budgets), reason))
    cached = plan.num_cells - 1
    if config.encoder_cache_tokens is None:
        decisions.append(Decision("encoder_cache_tokens", None, cached, _why_so_many(cached, largest)))
    served, what = min((largest, what_limits_items(limits, largest)), (cached, "encoder_cache_tokens"))
    if model.vision.smallest_item > served:
        reason = f"no image is served: the model's smallest has {model.vision.smallest_item} tokens; raise {what}"
        decisions.append(Decision("max_item_tokens", model.vision.smallest_item, served, reason))
    elif cached < largest:
        reason = f"images of more than {cached} tokens are refused: encoder_cache_tokens holds no more"
        decisions.append(Decision("max_item_tokens", largest, cached, reason))
    return decisions


def _graph_mode(
    config: EngineConfig, kernels: Mapping[str, KernelChoice], backend: GraphBackend
) -> tuple[EncoderGraphMode, str]:
    """Return the mode and its reason. ConfigError if `always` was asked for and is impossible."""
    asked = config.encoder_graph_mode
    if asked == "none":
        return "none", "as given"
    blockers = [op for op in kernels if op in ENCODER_OPS and not kernels[op].capturable]
    if config.video_pruning_rate > 0:
        reason = "with video_pruning_rate some of what the encoder gives is dropped behind it, and its graphs are off"
        remedies = [Remedy("video_pruning_rate", 0.0)]
    elif blockers:
        named = ", ".join(f"{op} ({kernels[op].implementation})" for op in blockers)
        reason, remedies = f"a graph of backend {backend} cannot hold {named}", []
    elif asked == "always":
        return "always", "as given: each budget's graph is used, whether or not it is faster"
    elif config.graph_mode == "none":
        return "none", "graph_mode is none, and nothing else asks for the encoder's graphs"
    else:
        return "auto", "after capture each budget's graph is timed against eager, and used if it is faster"
    if asked == "always":
        message = f"{MODE} always is impossible: {reason}"
        raise ConfigError(message, [*remedies, Remedy(MODE, "auto")])
    return "none", reason


def _graph_budgets(choice: EncoderChoice, limits: Limits) -> tuple[int, ...]:
    """Return the budgets of `choose_budgets` without its checks; an empty tuple without graphs."""
    if choice.mode == "none":
        return ()
    if choice.token_budgets is not None:
        return choice.token_budgets
    largest = max_item_tokens(choice, limits)
    return doubling(max(min(choice.vision.smallest_item, largest), choice.max_items_per_batch or 1), largest)


def _why_so_many(cached: int, largest: int) -> str:
    if cached >= CACHED_ITEMS * largest:
        return f"{CACHED_ITEMS} of the largest images ({largest} tokens)"
    part = f"{CACHED_ITEMS} would take more than an eighth of the cache's memory, or leave blocks and slots too little"
    if cached > largest:
        return f"as many as there is room for, and at least one of the largest images ({largest} tokens): {part}"
    return f"one of the largest images ({largest} tokens): {part}"


def _default(name: str) -> object:
    return EngineConfig.model_fields[name].default
