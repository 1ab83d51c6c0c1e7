"""The plan as tables, for people. Readable at 80 columns; without colour if the output is no terminal.

The vision encoder, speculation and the predicted time of steps have parts of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from math import isqrt
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ostinato.config import BYTE_SETTINGS
from ostinato.config_fields import BUDGETS
from ostinato.plan.cache_files import CacheFilesPlan
from ostinato.plan.decision import Decision
from ostinato.plan.encoder.encoder_plan import EncoderPlan, what_limits_items
from ostinato.plan.limits import Limits
from ostinato.plan.memory.split import MemoryPlan
from ostinato.plan.plan import Plan, StateSummary, VisionSummary
from ostinato.plan.prediction import HOW_TO_MEASURE, PredictedStep, Prediction
from ostinato.plan.render.graph_tables import graph_rows, short_sizes
from ostinato.plan.rope import LayerRope
from ostinato.plan.speculation import SpeculativePlan, draft_capture
from ostinato.units import counted, format_bytes


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
    limit = (
        "encoder_cache_tokens"
        if served < encoder.max_item_tokens
        else what_limits_items(limits, encoder.max_item_tokens)
    )
    yield f"more: refused ({limit})"


def _size(tokens: int, side: int) -> str:
    """Return a text with the number of tokens, and the largest square image that has no more."""
    pixels = isqrt(tokens) * side
    return f"{tokens} tokens, {pixels} x {pixels} pixels"


def _when(plan: Plan) -> str:
    return "at start-up" if plan.settings.capture == "startup" else "when first needed"


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
    if speculative.ropes:
        yield "drafter's rope", rope_text(speculative.ropes)


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


QUIET = 0.1
"""Share of the processors' time that other work may take while rates are measured."""


def time_rows(prediction: Prediction) -> Iterator[tuple[str, str]]:
    """Yield (name, time) of each step, and the source of the prediction."""
    for step in prediction.steps:
        yield _name(step), _time(step, "at least " if prediction.is_lower_bound else "")
    yield "source" if prediction.steps else "", prediction.reason
    if prediction.rates is not None:
        yield "", f"memory {prediction.rates.bandwidth / 1e9:.0f} GB/s, products {_rate(prediction)}"
        if prediction.rates.other_load > QUIET:
            yield "", f"other work took {prediction.rates.other_load:.0%} of the processors meanwhile: --measure again"


def _name(step: PredictedStep) -> str:
    if step.tokens_per_row > 1:
        return f"prompt of {step.tokens_per_row}"
    return f"{counted(step.rows, 'row')}, context {step.context}"


def _time(step: PredictedStep, prefix: str) -> str:
    """Return text such as `13.9 ms, 72 tokens/s; linear 84%, bound by memory`, on a GPU with its launch time."""
    share = step.parts[step.largest] / step.seconds
    most = " at the most" if prefix else ""
    words = f"{prefix}{_milliseconds(step.seconds)}, {step.tokens_per_second:,.0f} tokens/s{most}"
    words += f"; {step.largest} {share:.0%}, bound by {step.bound}"
    if step.eager_seconds is None:
        return words
    return f"{words}; {step.launches:,} launches, eagerly at least {_milliseconds(step.eager_seconds)}"


def _milliseconds(seconds: float) -> str:
    milliseconds = seconds * 1e3
    digits = 0 if milliseconds >= 100 else 1 if milliseconds >= 10 else 2 if milliseconds >= 0.1 else 3
    return f"{milliseconds:,.{digits}f} ms"


def _rate(prediction: Prediction) -> str:
    assert prediction.rates is not None, "what was measured has a rate"
    return f"{prediction.rates.product_rate / 1e9:,.0f} GFLOP/s"


def print_plan(plan: Plan, console: Console) -> None:
    """Print every section that the plan has."""
    console.print(render_plan(plan))


def summary_line(plan: Plan) -> str:
    """Return the plan in one line: that it fits, for how many requests and tokens, and how fast decoding is."""
    settings, memory = plan.settings, plan.memory
    words = f"It fits: {settings.max_num_seqs:,} request{'s' if settings.max_num_seqs > 1 else ''}"
    if memory.kv_block:
        words += f", a cache of {(memory.num_blocks - 1) * settings.block_size:,} tokens"  # block 0 holds none
    decode = [step for step in plan.prediction.steps if step.tokens_per_row == 1]
    if not decode:
        helps = HOW_TO_MEASURE in plan.prediction.reason
        return f"{words}; {'--measure predicts its speed' if helps else 'speed not predicted'}"
    about = "at most" if plan.prediction.is_lower_bound else "about"
    return f"{words}, {about} {max(decode, key=lambda step: step.rows).tokens_per_second:,.0f} tokens/s"


def render_plan(plan: Plan) -> RenderableType:
    sections: list[RenderableType] = [
        Padding(Text(summary_line(plan)), (0, 0, 1, 0)),
        _section("model", _model_rows(plan)),
        _section("device", _device_rows(plan)),
        _section("settings", _settings_rows(plan)),
        _section("graphs", graph_rows(plan.capture, plan.settings)),
        _memory(plan),
        _section("prefix cache", _prefix_cache_rows(plan)),
        *([_section("speculation", speculation_rows(plan))] if plan.speculative is not None else []),
        *([_section("encoder", encoder_rows(plan))] if plan.encoder is not None else []),
        _section("kernels", _kernel_rows(plan)),
        _section("time of a step, predicted", time_rows(plan.prediction)),
        _decisions(plan),
    ]
    if plan.measured:
        sections.append(_section("measured", ((name, str(value)) for name, value in plan.measured.items())))
    return Group(*sections)


def _section(title: str, rows: Iterator[tuple[str, str]]) -> RenderableType:
    table = _table(title)
    for name, value in rows:
        table.add_row(name, escape(value))
    return Padding(table, (0, 0, 1, 0))


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False)
    table.add_column(style="cyan", no_wrap=True, min_width=24)
    table.add_column(overflow="fold")
    return table


def _model_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    model = plan.model
    yield "architecture", f"{model.architecture}, {model.parameters:,} parameters, {model.checkpoint_dtype}"
    yield "layers", ", ".join(f"{count} {kind}" for kind, count in model.layers.items())
    yield "sizes", f"hidden {model.hidden_size}, vocabulary {model.vocab_size}"
    if model.vision is not None:
        yield "encoder", vision_row(model.vision)
    if model.kv_bytes_per_token:
        yield "keys and values", f"{format_bytes(model.kv_bytes_per_token)} per token"
    if model.states:
        yield "state", f"{format_bytes(model.state_bytes_per_request)} per request"
    for kind in dict.fromkeys(state.layer for state in model.states):
        yield f"state of {kind}", ", ".join(_array(state) for state in model.states if state.layer == kind)


def _array(state: StateSummary) -> str:
    shape = " x ".join(map(str, state.shape))
    return f"{state.array} {shape} {state.dtype} {format_bytes(state.num_bytes)}"


def _device_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    device = plan.device
    yield "name", f"{device.name} ({device.kind})"
    yield "memory", _bytes(device.memory_bytes)
    if device.bandwidth is not None:
        yield "bandwidth", f"{device.bandwidth / 1e9:,.0f} GB/s"
    yield "source", device.source


def _settings_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    settings = plan.settings
    rounded = "" if settings.ssm_state_dtype == "float32" else f", rounded {settings.ssm_state_rounding}"
    kept = "" if settings.kv_cache_dtype == settings.dtype else f", keys and values {settings.kv_cache_dtype}"
    states = f", SSM state {settings.ssm_state_dtype}{rounded}" if plan.model.states else ""
    yield "dtype", f"{settings.dtype}{kept}{states}"
    if settings.quantization is not None:
        yield "quantization", f"{settings.quantization.name}, {settings.quantization.granularity}"
    yield "max_num_seqs", f"{settings.max_num_seqs} requests"
    yield "max_num_batched_tokens", f"{settings.max_num_batched_tokens} tokens"
    yield "max_model_len", f"{settings.max_model_len} tokens"
    if plan.memory.kv_block:
        yield "block_size", f"{settings.block_size} tokens"
    yield "enable_chunked_prefill", "on" if settings.enable_chunked_prefill else "off"
    yield "scheduling_policy", settings.scheduling_policy
    if settings.deterministic:
        yield "deterministic", "on: the decode recurrence for prompts too, sums in a fixed order"
    yield "threads", "left to torch" if settings.threads is None else str(settings.threads)
    if settings.ropes:
        yield "rope", rope_text(settings.ropes)


def rope_text(ropes: Sequence[LayerRope]) -> str:
    """Return a model's rotary embeddings as text; of several, each on a line with its layers."""
    texts = [f"{each.rope.kind}, theta {each.rope.theta:g}" for each in ropes]
    if len(ropes) > 1:
        texts = [f"{text}: layers {_number_ranges(each.layers)}" for text, each in zip(texts, ropes, strict=True)]
    return "\n".join(texts)


def _number_ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text, such as `0-4, 6`."""
    runs = [
        [number for _, number in run] for _, run in groupby(enumerate(numbers), lambda indexed: indexed[1] - indexed[0])
    ]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _memory(plan: Plan) -> RenderableType:
    memory = plan.memory
    table = _table("memory")
    table.columns[1].justify = "right"
    table.add_column(justify="right")
    table.add_column(overflow="fold")
    blocks = f"{memory.num_blocks:,} of {format_bytes(memory.kv_block)}"
    window_blocks = f"{memory.num_window_blocks:,} of {format_bytes(memory.window_block)}"
    slots = f"{memory.num_slots:,} of {format_bytes(memory.state_slot)}"
    packed = f"{memory.num_packed:,} of {format_bytes(memory.packed_state)}, in 8 bits"
    drafter = 0 if plan.speculative is None else plan.speculative.weights
    for name, size, note in (
        ("weights", memory.weights, f"with the drafter's {format_bytes(drafter)}" if drafter else ""),
        *([("of them mapped", memory.mapped_weights, "pages of the file")] if memory.mapped_weights else ()),
        ("activations", memory.activations, "at most, in one step"),
        ("graphs", memory.graphs, "at most, with their buffers" if memory.graphs else ""),
        *_encoder_memory(memory),
        *([("blocks", memory.num_blocks * memory.kv_block, blocks)] if memory.kv_block else ()),
        *(
            [("window_blocks", memory.num_window_blocks * memory.window_block, window_blocks)]
            if memory.num_window_blocks
            else ()
        ),
        *([("slots", memory.num_slots * memory.state_slot, slots)] if memory.state_slot else ()),
        *([("checkpoints", memory.num_packed * memory.packed_state, packed)] if memory.packed_state else ()),
        ("together", memory.used, ""),
        ("available", memory.available, ""),
    ):
        table.add_row(name, format_bytes(size), f"{size:,} B", note)
    if memory.state_slot:
        table.add_row("slots per request", str(memory.slots_per_request), "", "")
    return Padding(table, (0, 0, 1, 0))


def _encoder_memory(memory: MemoryPlan) -> Iterator[tuple[str, int, str]]:
    if memory.encoder_graphs:
        yield "encoder graphs", memory.encoder_graphs, "at most, with their buffers"
    if memory.encoder_cache:
        yield "encoder cache", memory.encoder_cache, ""


def _prefix_cache_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    settings, memory = plan.settings, plan.memory
    has_state = memory.state_slot > 0
    yield "enable_prefix_caching", "on" if settings.enable_prefix_caching else "off"
    if has_state:
        yield "state_cache_mode", settings.state_cache_mode
    if memory.expected_prefix_tokens is None:
        return
    if has_state:
        yield "state_block_size", f"{settings.state_block_size} tokens"
        yield "checkpoint_policy", settings.checkpoint_policy
    yield "eviction_policy", settings.eviction_policy
    yield "hits", str(plan.hit_law)
    if has_state:
        packed = f", {memory.num_packed:,} of them in 8 bits" if memory.packed_state else ""
        what = "places" if memory.packed_state else "slots"
        yield "checkpoints", f"{memory.num_checkpoints:,} {what} beyond the working ones{packed}"
    pins = plan.pins
    yield (
        "marks",
        f"pin at most {pins.max_pins:,} prefixes, for {pins.max_ttl:,} seconds at most; one takes "
        f"{format_bytes(pins.bytes_per_pin)} and its blocks, all together at most {pins.max_blocks:,} blocks",
    )
    count = memory.prefix_tokens // memory.expected_prefix_tokens
    prefixes = f"{count:,} prefixes of {memory.expected_prefix_tokens:,} tokens"
    if plan.cache_files is not None:
        yield "files", _files(plan.cache_files)
    yield "holds", f"{prefixes} ({memory.prefix_tokens:,} tokens) beside {settings.max_num_seqs} running requests"


def _files(files: CacheFilesPlan) -> str:
    """Return a text on the files for evicted blocks: where, how large, and from which length on they are read back."""
    where = files.directory or "~/.cache/ostinato/prefixes"
    sizes = " and ".join(
        f"{format_bytes(size)} for {what}"
        for what, size in (
            ("a block", files.block_bytes),
            ("a window block", files.window_block_bytes),
            ("a state", files.slot_bytes),
        )
        if size
    )
    when = (
        "reading never pays"
        if files.min_tokens_to_read is None
        else f"read from {files.min_tokens_to_read:,} tokens on"
    )
    return (
        f"at most {format_bytes(files.limit)} in {where}: {sizes}; {when} ({files.bytes_per_second / 1e6:,.0f} MB/s "
        f"against {files.flops_per_second / 1e9:,.0f} GFLOP/s)"
    )


def _kernel_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield one row per implementation and reason, since most operations share them."""
    shared: dict[tuple[str, str], list[str]] = {}
    for op, choice in plan.kernels.items():
        reason = choice.reason if choice.capturable else f"{choice.reason}; no graph can hold it"
        shared.setdefault((choice.implementation, reason), []).append(op)
    for (implementation, reason), ops in shared.items():
        yield implementation, f"{', '.join(ops)} ({reason})"
    launches = sum(len(choice.launches) for choice in plan.kernels.values())
    if launches:
        yield "launches", f"{launches} distinct ones of Triton in the plan's steps; --launches lists them"


def render_launches(plan: Plan) -> RenderableType:
    """Return a table of the launches of each Triton kernel in the plan's steps."""
    table = Table(title="launches", title_justify="left", title_style="bold", box=None)
    for heading in ("operation", "kernel", "warps", "stages", "registers", "constants"):
        is_number = heading in ("warps", "stages", "registers")
        table.add_column(heading, justify="right" if is_number else "left", header_style="")
    for op, choice in plan.kernels.items():
        for launch in choice.launches:
            constants = ", ".join(f"{name} {value}" for name, value in launch.blocks.items())
            numbers = (launch.num_warps, launch.num_stages, launch.registers or "")
            table.add_row(op, launch.kernel, *map(str, numbers), constants)
    return table


def _decisions(plan: Plan) -> RenderableType:
    title = Text("decisions", style="bold")
    # The model has no states, and nothing about them was asked for.
    idle = ("state_cache_mode",) if not plan.model.states else ()
    decisions = [each for each in plan.decisions if each.topic not in idle or each.requested not in (None, "auto")]
    if not decisions:
        return Group(title, Text("  none: every setting is as given or by default"))
    entries: list[RenderableType] = [title]
    for decision in decisions:
        requested, effective = (_value(decision, value) for value in (decision.requested, decision.effective))
        entries.append(Text.assemble("  ", (decision.topic, "cyan"), f": {requested} -> {effective}"))
        entries.append(Padding(Text(decision.reason), (0, 0, 0, 4)))
    return Group(*entries)


def _value(decision: Decision, value: Any) -> str:
    if value is None:
        return "open"
    return _bytes(value) if decision.topic in BYTE_SETTINGS else str(value)


def _bytes(count: int) -> str:
    return f"{format_bytes(count)} ({count:,} B)"
