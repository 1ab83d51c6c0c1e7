"""The vision encoder's part of a plan, as text for people."""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt

from ostinato.plan.encoder.choice import EncoderPlan, what_limits_items
from ostinato.plan.limits import Limits
from ostinato.plan.plan import Plan, VisionSummary
from ostinato.plan.words.render_graphs import short_sizes
from ostinato.size_lists import BUDGETS
from ostinato.units import format_bytes


def vision_row(vision: VisionSummary) -> str:
    side = vision.token_side
    return (
        f"{vision.layers} layers, hidden {vision.hidden_size}, {vision.parameters:,} parameters; "
        f"a token for {side} x {side} pixels"
    )


def encoder_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of each row; a text may have several lines. Nothing for a model that takes text alone."""
    encoder, vision = plan.encoder, plan.model.vision
    if encoder is None or vision is None:
        return
    yield "encoder_graph_mode", f"{encoder.graph_mode}: {encoder.reason}"
    if encoder.graph_mode != "none":
        yield "captured", f"{_when(plan)}, by backend {encoder.backend}"
        yield "budgets, tokens", short_sizes(encoder.token_budgets)
        yield "images in one graph", f"at most {encoder.max_items_per_batch}"
    served = min(encoder.max_item_tokens, encoder.num_cells - 1)
    yield "an image of up to", "\n".join(_served(plan, encoder, served, vision.token_side))
    cells = f"{encoder.num_cells - 1:,} tokens of {format_bytes(encoder.cell_bytes)}"
    yield "cache", f"{cells}, {format_bytes(encoder.cache_bytes)} in all"
    yield "encoding", f"{format_bytes(encoder.activation_bytes)} at most, for the largest images"
    if encoder.video_pruning_rate:
        yield "video_pruning_rate", f"{encoder.video_pruning_rate:g} of a video's tokens are left out"


def _served(plan: Plan, encoder: EncoderPlan, served: int, side: int) -> Iterator[str]:
    """Yield one line for each range of images, the smallest first: their budget's graph, eager, or refused."""
    for budget in encoder.token_budgets:
        if budget < served:
            yield f"{_size(budget, side)}: budget {budget}"
        else:
            yield f"{_size(served, side)}: budget {budget}"
            break
    largest = max(encoder.token_budgets, default=0)
    if largest < served:
        covers = ""
        if encoder.token_budgets:
            covers = f"; {BUDGETS} {short_sizes([*encoder.token_budgets, served])} would cover them"
        yield f"{_size(served, side)}: eager, alone{covers}"
    settings = plan.settings
    limits = Limits(settings.max_num_seqs, settings.max_num_batched_tokens, settings.max_model_len)
    limit = "encoder_cache_tokens" if served < encoder.max_item_tokens else what_limits_items(limits)
    yield f"more: refused ({limit})"


def _size(tokens: int, side: int) -> str:
    """Return a text with the number of tokens, and the largest square image that has no more."""
    pixels = isqrt(tokens) * side
    return f"{tokens} tokens, {pixels} x {pixels} pixels"


def _when(plan: Plan) -> str:
    return "at start-up" if plan.settings.capture == "startup" else "when first needed"
