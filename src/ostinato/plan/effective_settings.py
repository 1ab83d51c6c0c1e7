"""EffectiveSettings: the settings that the engine runs with, after every open one has its value; and their choice.

The overlap executor schedules each step while the one before it runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Self

from pydantic import ConfigDict

from ostinato.config import EngineConfig
from ostinato.errors import ConfigError, ModelError, Remedy
from ostinato.kv_cache.checkpoints import StateCacheMode
from ostinato.ops.sizes import DTYPE_BYTES, INT8_STATE_TOKENS, SCAN_CHUNK
from ostinato.plan.decision import Decision, no_effect
from ostinato.plan.device.gpu_catalogue import DeviceSpec
from ostinato.plan.mixers import StateDtype, StateSpec
from ostinato.plan.model import MODEL_DTYPES, ModelSpec
from ostinato.plan.quantization import AnyQuantization
from ostinato.plan.rope import LayerRope
from ostinato.units import format_bytes


class EffectiveSettings(EngineConfig):
    """Config after planning. A setting that is None has its outcome in another section of the plan.

    `device` is `cpu` or `cuda`; `quantization` is that of the weights while the model runs; `kv_cache_dtype` is `int8`
    or the model's dtype; `threads` is None where torch chooses it (on a GPU); `ropes` are the rotary embeddings, as
    resolved for `max_model_len`, each with its layers.
    """

    model_config = ConfigDict(strict=False)

    quantization: AnyQuantization | None = None  # type: ignore[assignment]
    kv_cache_dtype: str  # type: ignore[assignment]
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    memory_utilization: float
    state_cache_mode: StateCacheMode
    state_block_size: int
    ropes: tuple[LayerRope, ...] = ()

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        *,
        ropes: tuple[LayerRope, ...],
        quantization: AnyQuantization | None,
        **decided: object,
    ) -> Self:
        """Return `config` with values for its open settings. Given values never change here."""
        asked = {name: getattr(config, name) for name in EngineConfig.model_fields}
        for name, value in decided.items():
            # A model without state layers plans mode `none`, whatever mode was given.
            is_open = (
                not config.is_given(name) or asked[name] == "auto" or (name, value) == ("state_cache_mode", "none")
            )
            assert is_open or asked[name] == value, f"{name} was given as {asked[name]!r} and planned as {value!r}"
        return cls(**asked | decided | {"ropes": ropes, "quantization": quantization})


def choose_dtype(config: EngineConfig, model: ModelSpec) -> tuple[str, list[Decision]]:
    """Return the dtype of weights and activations: the given one, else the checkpoint's."""
    if config.dtype in ("auto", model.dtype):
        return model.dtype, []
    reason = f"as given, though the checkpoint's weights are {model.dtype}: they are converted while loading"
    return config.dtype, [Decision("dtype", config.dtype, config.dtype, reason)]


def choose_ssm_state_dtype(config: EngineConfig, model: ModelSpec) -> tuple[str, list[Decision]]:
    """Return the dtype of SSM states in slots: the given one, else the checkpoint's, else float32.

    ModelError if the checkpoint asks for one that is not supported.
    """
    given = config.ssm_state_dtype != "auto"
    dtype = config.ssm_state_dtype if given else model.ssm_state_dtype or "float32"
    if dtype not in MODEL_DTYPES:
        known = ", ".join(MODEL_DTYPES)
        raise ModelError(f"config.json has mamba_ssm_cache_dtype {dtype!r}; the supported ones are {known}")
    if not model.has_recurrence or DTYPE_BYTES[dtype] >= DTYPE_BYTES["float32"]:
        return dtype, []
    _check_width(model, dtype)
    if config.ssm_state_rounding == "stochastic":
        _check_rounding(model, dtype)
    origin = "as given" if given else "as the checkpoint asks"
    how = "to nearest" if config.ssm_state_rounding == "nearest" else "stochastically"
    when = "after each token" if config.deterministic else f"after each token, of a prompt every {SCAN_CHUNK}"
    reason = f"{origin}; rounded {how} {when}"
    if not config.deterministic:
        reason += ", so a prompt that chunking cuts elsewhere, or that is computed again, has slightly other results"
    return dtype, [Decision("ssm_state_dtype", config.ssm_state_dtype, dtype, reason)]


def choose_ssm_checkpoint_dtype(
    config: EngineConfig, model: ModelSpec, device: DeviceSpec, dtype: str, ssm_state_dtype: str
) -> tuple[int, list[Decision]]:
    """Return the bytes of a packed checkpoint; 0 if checkpoints are states as they are in slots.

    ConfigError if 8 bits were asked for and these states are not packed.
    """
    setting = "ssm_checkpoint_dtype"
    if config.ssm_checkpoint_dtype == "auto":
        return 0, []
    if not model.has_recurrence:
        return 0, [no_effect(config, setting, "the model has no recurrent state")]
    if device.kind != "cpu":
        message = f"{setting} int8: states are packed on CPUs, and not yet on GPUs; use {setting} auto"
        raise ConfigError(message, [Remedy(setting, "auto")])
    if DTYPE_BYTES[ssm_state_dtype] != DTYPE_BYTES["float32"]:
        raise ConfigError(
            f"{setting} int8 packs states of 32 bits, and ssm_state_dtype is {ssm_state_dtype}; use ssm_state_dtype "
            f"float32, or {setting} auto",
            [Remedy("ssm_state_dtype", "float32"), Remedy(setting, "auto")],
        )
    widths: dict[StateDtype, int] = {"model": DTYPE_BYTES[dtype], "state": DTYPE_BYTES[ssm_state_dtype]}
    packed, whole = (
        sum(count(state, widths) for state in model.states) for count in (StateSpec.packed_bytes, StateSpec.num_bytes)
    )
    reason = (
        f"as given: a checkpoint takes {format_bytes(packed)} in place of {format_bytes(whole)}; running states are "
        f"rounded to 8 bits after every {INT8_STATE_TOKENS} tokens, with or without a checkpoint there, so hits change "
        "no token; results differ from those without it: perplexity of the embedded model is 0.3 % higher"
    )
    return packed, [Decision(setting, "int8", "int8", reason)]


def _check_width(model: ModelSpec, dtype: str) -> None:
    """Raise ConfigError if a state layer's operations only take states of 32 bits."""
    wide = sorted({mixer.kind for mixer in model.state_layers if mixer.needs_float32})
    if wide:
        raise ConfigError(
            f"ssm_state_dtype {dtype}: {' and '.join(wide)} layers lose what they add in small steps in states of 16 "
            "bits; use ssm_state_dtype float32",
            [Remedy("ssm_state_dtype", "float32")],
        )


def _check_rounding(model: ModelSpec, dtype: str) -> None:
    """Raise ConfigError if a state layer's operations only round states of 16 bits to nearest."""
    others = {mixer.kind for mixer in model.state_layers if mixer.state.recurrent_elements} - {
        mixer.kind for mixer in model.state_layers if mixer.rounds_stochastically
    }
    if others:
        raise ConfigError(
            f"ssm_state_rounding stochastic: {' and '.join(sorted(others))} layers round states to nearest alone; "
            f"ssm_state_rounding nearest, or ssm_state_dtype float32 in place of {dtype}",
            [Remedy("ssm_state_rounding", "nearest"), Remedy("ssm_state_dtype", "float32")],
        )


def choose_threads(config: EngineConfig, device: DeviceSpec) -> int | None:
    """Return the CPU threads of a rank: the given number, else its part of the cores that the process may use.

    On a GPU it is None, which means torch's own choice.
    """
    if config.threads is not None:
        return config.threads
    return max(1, device.cores // config.tensor_parallel_size) if device.kind == "cpu" else None


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
