"""The speculation of a plan, as text for people."""

from __future__ import annotations

from collections.abc import Iterator

from ostinato.plan.plan import Plan
from ostinato.plan.speculation.draft_capture import draft_capture
from ostinato.plan.speculation.drafter import SpeculativePlan
from ostinato.plan.words.render_graphs import short_sizes
from ostinato.units import format_bytes


def speculation_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of each row; nothing without speculation."""
    speculative = plan.speculative
    if speculative is None:
        return
    k = speculative.num_speculative_tokens
    yield "method", f"{speculative.method}: {speculative.reason}"
    yield "drafts", f"{k} of each request in a step, which verifies 1 + {k} tokens"
    if speculative.adaptive:
        yield "speculative_adaptive", "on: steps do without drafts where these do not pay"
    else:
        yield "speculative_adaptive", "off: every step that decodes has drafts"
    if speculative.architecture is not None:
        yield "drafter", f"{speculative.architecture}, {speculative.parameters:,} parameters"
        yield "drafter's weights", format_bytes(speculative.weights)
        yield "drafter's part", _part(speculative)
        yield (
            "drafter's graphs",
            (
                "\n".join(_graphs(plan, speculative))
                or f"none: it runs eagerly, since graph_mode {plan.settings.graph_mode} has no full graphs"
            ),
        )
    if speculative.rope is not None:
        yield "drafter's rope", f"{speculative.rope.kind}, theta {speculative.rope.theta:g}"


def _part(speculative: SpeculativePlan) -> str:
    block, slot = format_bytes(speculative.kv_block), format_bytes(speculative.state_slot)
    return f"{block} of each block, {slot} of each slot"


def _graphs(plan: Plan, speculative: SpeculativePlan) -> Iterator[str]:
    assert speculative.method != "ngram", "only what has weights has graphs"
    settings = plan.settings
    capture = draft_capture(plan.capture, speculative.method, settings.max_num_seqs, settings.max_num_batched_tokens)
    if capture.rows:
        yield f"full, rows {short_sizes(capture.rows)}; of 1 token each"
    if capture.tokens:
        yield f"piecewise, tokens {short_sizes(capture.tokens)}"
