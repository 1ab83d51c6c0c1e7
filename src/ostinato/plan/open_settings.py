"""Choice of settings that the user left open: the overlap executor, the tokenizer and the chat template.

The overlap executor schedules each step while the one before it runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from ostinato.config import EngineConfig
from ostinato.errors import ConfigError, Remedy
from ostinato.plan.decision import Decision
from ostinato.plan.device.gpu_catalogue import DeviceSpec
from ostinato.plan.model import ModelSpec
from ostinato.units import format_bytes


def choose_overlap(config: EngineConfig, device: DeviceSpec) -> tuple[Literal["on", "off"], list[Decision]]:
    """Return the given setting, else `on` where overlap hides the host's work. ConfigError for `on` with drafts."""
    asked, drafts = config.overlap, config.speculative is not None
    if asked == "on" and drafts:
        message = (
            "overlap on schedules a step before the one in front of it is over, and how many drafts of that one are "
            "accepted is not known by then; set overlap to off or auto, or leave speculative out"
        )
        raise ConfigError(message, [Remedy("overlap", "off"), Remedy("speculative", None)])
    if asked == "on":
        threads = ", beside the kernels' threads, which it takes time from" if device.kind == "cpu" else ""
        reason = f"as given: a step is scheduled while the one before it runs{threads}"
        return "on", [Decision("overlap", asked, "on", reason)]
    if asked == "off":
        return "off", []
    if config.tensor_parallel_size > 1:
        reason = "with several ranks every step would begin with an exchange of its tokens; `on` asks for it"
    elif drafts:
        reason = "a step with drafts ends with as many tokens as were accepted, so the next one waits for it"
    elif device.kind == "cpu":
        reason = "the cores that would schedule the next step are those that compute this one"
    else:
        reason = "the host schedules a step while the device computes the one before it"
        return "on", [Decision("overlap", asked, "on", reason)]
    return "off", [Decision("overlap", asked, "off", reason)]


def choose_chunks(config: EngineConfig, model: ModelSpec) -> tuple[EngineConfig, list[Decision]]:
    """Return the config for the model: prompts whose tokens see each other in both directions are not cut.

    ConfigError if they are to be.
    """
    name, chunked = "enable_chunked_prefill", config.enable_chunked_prefill
    if not model.is_prefix_lm or not chunked:
        return config, []
    reason = "the tokens of a prompt see each other in both directions (prefix_lm), so one step computes all of them"
    if config.is_given(name):
        raise ConfigError(f"{name} cuts prompts, and with this model none can be cut: {reason}", [Remedy(name, False)])
    return config.with_settings(**{name: False}), [Decision(name, chunked, False, reason)]


def text_decisions(config: EngineConfig, model: ModelSpec) -> Iterator[Decision]:
    """Yield the decisions on a part that is not run, on tables on disk, and on a given tokenizer or template."""
    if model.left_out is not None:
        parts = "its text part" if model.vision is None else "its text and images"
        yield Decision("model", config.model, parts, model.left_out)
    if model.encoder_file is not None:
        reason = "the largest encoder of images beside the text's file that belongs to this model"
        yield Decision("encoder", None, model.encoder_file, reason)
    draft = None if model.drafter is None else model.drafter.model
    on_disk = model.disk_bytes + (0 if draft is None else draft.disk_bytes)
    if on_disk:
        reason = (
            "embeddings of n-grams: a step reads some of their rows where the file is mapped, so they count as no "
            "memory; the system keeps in memory what there is room for"
        )
        yield Decision("tables", None, f"{format_bytes(on_disk)} on disk", reason)
    if config.tokenizer is not None:
        reason = "as given, in place of the checkpoint's, and its chat template too"
        if model.given_tokens is not None:
            reason += f"; {model.given_tokens:,} of the model's {model.vocab_size:,} token ids have a text"
        yield Decision("tokenizer", config.tokenizer, config.tokenizer, reason)
    if config.chat_template is not None:
        whose = "checkpoint's" if config.tokenizer is None else "tokenizer's"
        reason = f"as given, in place of the {whose}"
        yield Decision("chat_template", config.chat_template, config.chat_template, reason)
