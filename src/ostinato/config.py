"""EngineConfig: the user's settings, validated. The plan decides what follows from them.

A setting that is left out is open: the plan chooses its value, and may lower it to what fits. A setting that is given
is never changed.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal, Unpack, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from ostinato.config_fields import Speculative, checked_sizes, speculative_fields
from ostinato.errors import ConfigError
from ostinato.setting_names import by_canonical_name, config_error, describe_fields, plain_numbers
from ostinato.units import read_size

if TYPE_CHECKING:
    from ostinato.setting_types import EngineSettings

BYTE_SETTINGS = ("cache_memory", "cache_offload", "record_limit")
"""Settings that are bytes, and can be given as 8GiB."""

BLOCK_SIZES = (16, 32, 64, 128, 256)
MAX_REQUESTS, MAX_TOKENS = 2**16, 2**20
"""Largest numbers of requests and of tokens in a step: their ladders of graphs are planned in a moment."""


@describe_fields
class EngineConfig(BaseModel):
    """The settings of an engine. The descriptions below are also the help of the command line.

    An unknown name, a bad value, or a setting given under both its names is a ConfigError.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    model: str = Field(
        "demo",
        description="`demo`, `demo-vl`, `smollm2`, `gemma3-270m`, a checkpoint directory, a GGUF file, or a hub id "
        "(OWNER/NAME, or OWNER/NAME:FILE.gguf).",
    )
    revision: str | None = Field(None, description="Branch, tag or commit, for a hub id.")
    download_dir: str | None = Field(
        None, description="Where files of hub ids are kept and looked for (huggingface_hub's cache, under HF_HOME)."
    )
    tokenizer: str | None = Field(
        None,
        description="Whose tokenizer and chat template are used in place of the checkpoint's: a directory, a GGUF file "
        "or a hub id.",
    )
    chat_template: str | None = Field(
        None, description="A file with the chat template, in Jinja, in place of the checkpoint's."
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="Of weights and activations; auto is the checkpoint's own."
    )
    quantization: Literal["auto", "none", "int8", "int8_g128", "int4", "int4_g64", "int4_g32"] | None = Field(
        "auto",
        description="Of weights, made while loading: 8 bits with one scale per row (int8) or per 128 elements of one "
        "(int8_g128), or 4 bits with a scale and a zero point per 128 (int4), 64 or 32 elements; auto is the "
        "checkpoint's own.",
    )
    activation_dtype: Literal["auto", "int8"] = Field(
        "auto",
        description="Of the inputs of linear layers with int8 weights: the model's dtype (auto), or rounded to 8 bits "
        "with one scale for each token (int8, W8A8), which multiplies faster and loses accuracy.",
    )
    ssm_state_dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="Of the states of recurrences in slots; auto is the checkpoint's wish, else float32."
    )
    ssm_state_rounding: Literal["nearest", "stochastic"] = Field(
        "nearest",
        description="Of these states to 16 bits: to the nearest value, or to either neighbour with noise that leaves "
        "the mean as it is (stochastic).",
    )
    ssm_checkpoint_dtype: Literal["auto", "int8"] = Field(
        "auto",
        description="Of these states in cached checkpoints: as in slots (auto), or 8 bits with one scale for each 32 "
        "neighbours (int8), which take about a quarter of float32's memory.",
    )
    kv_cache_dtype: Literal["auto", "int8"] = Field(
        "auto",
        description="Of keys and values in blocks: the model's dtype (auto), or 8 bits with one scale for each token's "
        "head (int8), which take about half the memory.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Auto is a GPU if there is one.")
    max_num_seqs: int | None = Field(
        None, ge=1, le=MAX_REQUESTS, description="Most requests running at once (256; 32 on a CPU; less if less fits)."
    )
    max_num_batched_tokens: int | None = Field(
        None, ge=1, le=MAX_TOKENS, description="Most tokens in one step (8192; 1024 on a CPU; less if less fits)."
    )
    max_model_len: int | None = Field(
        None, ge=2, le=2**31 - 1, description="Most tokens of one request, its output included (the model's maximum)."
    )
    block_size: int = Field(16, description="Tokens in a block of keys and values: 16, 32, 64, 128 or 256.")
    enable_chunked_prefill: bool = Field(
        True, description="Long prompts are computed in parts, beside requests that are decoding."
    )
    memory_utilization: float | None = Field(
        None, gt=0.0, le=1.0, description="Part of the device's memory to use (0.9 of a GPU; 1.0 on a CPU)."
    )
    cache_memory: int | None = Field(
        None, ge=1, description="Bytes for blocks and slots, such as 4GiB (open: what is left; 4GiB on a CPU)."
    )
    enable_prefix_caching: bool = Field(
        True, description="What was computed for a prompt is kept, and found again by prompts that begin alike."
    )
    state_cache_mode: Literal["auto", "none", "align", "all"] = Field(
        "auto",
        description="Where checkpoints of a prompt's state are taken: nowhere, at ends of prefill chunks (align), or "
        "also inside them (all); auto is the finest that the model can do.",
    )
    state_block_size: int | None = Field(
        None,
        ge=16,
        description="Tokens between checkpoints, a multiple of block_size (256, or more where the model's chunk size "
        "asks for it).",
    )
    checkpoint_policy: Literal["boundaries", "boundaries+branches"] = Field(
        "boundaries+branches", description="Whether a checkpoint is also taken where a prompt leaves a cached prefix."
    )
    eviction_policy: Literal["marconi", "lru"] = Field(
        "marconi", description="What leaves the cache first: what saves the least work per byte, or what is oldest."
    )
    expected_prefix_tokens: int | None = Field(
        None,
        ge=1,
        description="Mean length of the prefixes that prompts share; it splits the cache into blocks and checkpoints "
        "(1024, or max_model_len if that is less).",
    )
    max_pinned_checkpoints: int | None = Field(
        None,
        ge=0,
        description="Most checkpoints that applications pin by marks, all clients together (half of those beyond the "
        "working slots).",
    )
    max_checkpoint_ttl: int = Field(3600, ge=1, description="Most seconds for which a mark pins a checkpoint.")
    cache_offload: int | None = Field(
        None,
        ge=1,
        description="Bytes of files, such as 8GiB, for what the prefix cache evicts: it is found again there, also "
        "after a restart. The files hold prompts.",
    )
    cache_dir: str | None = Field(
        None, min_length=1, description="Directory of these files (open: ~/.cache/ostinato/prefixes)."
    )
    kernels: Literal["auto", "native", "triton", "reference"] = Field(
        default="auto",
        description="auto: native kernels on a CPU and Triton kernels on a GPU where there are some for the operation "
        "and this machine, else the torch reference; native, triton: an error where an operation has none; reference: "
        "torch alone.",
    )
    deterministic: bool = Field(
        False,
        description="The same request gives the same bits, whatever else is in its batch and however its prompt was "
        "cut, cached or speculated. Prompts take longer. Needs native kernels.",
    )
    graph_mode: Literal["none", "piecewise", "full_decode_only", "full_and_piecewise"] = Field(
        "full_and_piecewise",
        description="Which steps are captured as graphs and replayed: any, without the parts that depend on its rows "
        "(piecewise), or those that only decode, whole (full).",
    )
    capture_sizes: tuple[int, ...] | None = Field(
        None,
        description="Token counts that piecewise graphs are captured for, such as 1,2,4,64 (1, 2, 4, steps of 8 up to "
        "256, then of 16, up to max_capture_size).",
    )
    capture_rows: tuple[int, ...] | None = Field(
        None,
        description="Row counts that full graphs are captured for (as capture_sizes, if those are given; else the same "
        "steps, up to max_num_seqs).",
    )
    max_capture_size: int | None = Field(
        None,
        ge=1,
        le=MAX_TOKENS,
        description="Largest token count of a piecewise graph (twice the tokens of max_num_seqs decoding requests, at "
        "most 512).",
    )
    performance_mode: Literal["balanced", "interactivity"] = Field(
        "balanced",
        description="With interactivity, every size up to 32 is captured, so that few users wait for no padding.",
    )
    capture: Literal["auto", "startup", "lazy"] = Field(
        "auto",
        description="When graphs are captured: all before the first request (startup), or each when first needed "
        "(lazy). `auto` is startup on a GPU, with a vision encoder and in a server, else lazy, for on a CPU a capture "
        "takes milliseconds.",
    )
    prefer_graph_sizes: bool = Field(
        True, description="Batches are composed to fit a graph with less padding, where nobody waits for it."
    )
    strict: bool = Field(False, description="A step that runs without a graph, though the plan has one, is an error.")
    check_replay: bool = Field(
        False, description="For debugging: what a graph computes is computed without it too, and compared."
    )
    overlap: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Whether a step is scheduled while the one before it runs, with the tokens still on the device; "
        "auto is on for one GPU without speculation.",
    )
    speculative: Speculative | None = Field(
        None,
        description="How tokens are guessed ahead, and how many, to be verified in one step: ngram:4 (copied from the "
        "text), mtp:3 (by the model's own prediction head), draft:PATH:4 (by a smaller checkpoint).",
    )
    speculative_adaptive: Literal["on", "off"] = Field(
        "on",
        description="Whether steps have fewer drafts, or none, where measuring says that this is faster; off: never.",
    )
    encoder_graph_mode: Literal["auto", "always", "none"] = Field(
        "auto",
        description="Which images are encoded by graphs: none; those for which graphs were measured to be faster "
        "(auto); or all that one can hold (always).",
    )
    encoder_token_budgets: tuple[int, ...] | None = Field(
        None,
        description="Numbers of image tokens that the encoder's graphs are captured for, such as 64,256,1024 (doubling "
        "from the model's smallest image, and its largest).",
    )
    encoder_max_items_per_batch: int | None = Field(
        None, ge=1, description="Most images that are encoded together by one graph (as many as fit)."
    )
    encoder_cache_tokens: int | None = Field(
        None,
        ge=1,
        description="Image tokens whose encoding is kept, for prompts that are computed in parts and for images that "
        "come again (4 of the largest images, or less where that is more than an eighth of the cache).",
    )
    video_pruning_rate: float = Field(
        0.0, ge=0.0, description="Part of a video's tokens to leave out, where the picture does not change: 0 to 0.99."
    )
    allow_remote_images: bool = Field(False, description="Images may be fetched by http and https.")
    scheduling_policy: Literal["fcfs", "priority"] = Field(
        "fcfs", description="First come, first served; or by priority, then as they came."
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        description="Processes that share the model, a rank each: heads, MLPs, experts and the vocabulary are cut "
        "among them, and each keeps its own part of weights, blocks and slots.",
    )
    seed: int = Field(0, ge=0, lt=2**64, description="Of requests that bring no seed of their own.")
    record: str | None = Field(
        None,
        min_length=1,
        description="Directory for a record of all requests, by step, from which `ostinato replay` runs them again. It "
        "holds prompts and outputs as token ids.",
    )
    record_limit: int = Field(
        2**30, ge=2**20, description="Bytes of the directory of records; beyond them the oldest files are removed."
    )
    record_images: bool = Field(
        False, description="Records hold the pixels of images too, without which requests with images are not replayed."
    )
    threads: int | None = Field(None, ge=1, le=2**12, description="CPU threads (the cores that the process may use).")
    random_weights: bool = Field(
        False, description="Random weights in place of the checkpoint's: a config.json is enough."
    )

    def __init__(self, **settings: Unpack[EngineSettings]) -> None:
        # None leaves a setting open, where it may be None: a plan prints so what was not given or does not exist.
        named: dict[str, Any] = plain_numbers(by_canonical_name(settings))
        open_settings = {name for name, value in named.items() if value is None and _may_be_none(type(self), name)}
        try:
            super().__init__(**{name: value for name, value in named.items() if name not in open_settings})
        except ValidationError as error:
            raise config_error(error.errors(include_url=False), EngineConfig.model_fields) from None

    if not TYPE_CHECKING:  # a type checker knows that it is frozen

        def __setattr__(self, name: str, value: object) -> None:
            raise ConfigError(f"an EngineConfig stays as it is made; with_settings({name}=...) returns a changed copy")

    @field_validator("model", "download_dir", "tokenizer", "chat_template", "cache_dir", "record", mode="before")
    @classmethod
    def _accept_a_path(cls, value: object) -> object:
        if isinstance(value, EngineConfig):
            raise ValueError("should be a model; the settings of an EngineConfig are keywords, LLM(model, **settings)")
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    @field_validator("dtype", "ssm_state_dtype", "ssm_checkpoint_dtype", "kv_cache_dtype", "device", mode="before")
    @classmethod
    def _accept_torch_objects(cls, value: object) -> object:
        """Accept torch.float32 and torch.device("cpu"), whose module need not be imported for that."""
        return str(value).removeprefix("torch.") if type(value).__module__ == "torch" else value

    @field_validator(*BYTE_SETTINGS, mode="before")
    @classmethod
    def _accept_a_size(cls, value: object) -> object:
        return read_size(value)

    @field_validator("speculative", mode="before")
    @classmethod
    def _accept_a_short_form(cls, value: object) -> object:
        if value is None or isinstance(value, Speculative):
            return value
        try:
            return Speculative(**speculative_fields(value))
        except ConfigError as error:
            raise _whole_error("speculative", error) from None

    @field_validator("capture_sizes", "capture_rows", "encoder_token_budgets", mode="before")
    @classmethod
    def _accept_a_list(cls, value: object, info: ValidationInfo) -> object:
        if value is None:
            return None
        try:
            return checked_sizes(str(info.field_name), _listed(value))
        except ConfigError as error:
            raise _whole_error("capture_sizes", error) from None

    @field_validator("video_pruning_rate")
    @classmethod
    def _leaves_a_part(cls, value: float) -> float:
        # The comparison is also false for NaN.
        if not value < 1:
            raise PydanticCustomError("video_pruning_rate", "should be less than 1", {"nearest": 0.99})
        return value

    @field_validator("block_size")
    @classmethod
    def _is_a_block_size(cls, value: int) -> int:
        if value not in BLOCK_SIZES:
            nearest = min(BLOCK_SIZES, key=lambda size: abs(size - value))
            message = "should be 16, 32, 64, 128 or 256"
            raise PydanticCustomError("block_size", message, {"nearest": nearest})
        return value

    @property
    def num_speculative_tokens(self) -> int:
        """Number of drafted tokens per step, k; 0 without speculation."""
        return 0 if self.speculative is None else self.speculative.num_speculative_tokens

    def is_given(self, setting: str) -> bool:
        """Return whether the user gave `setting`, so that its value must not be changed."""
        return setting in self.model_fields_set and getattr(self, setting) is not None

    def with_settings(self, **changes: object) -> EngineConfig:
        """Return this config with some settings given other values. Raises ConfigError as construction does."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return EngineConfig(**(given | changes))


def _may_be_none(model: type[BaseModel], name: str) -> bool:
    field = model.model_fields.get(name)
    return field is not None and type(None) in get_args(field.annotation)


def _listed(sizes: object) -> object:
    """Return the sizes of the command line's form, `1,2,4`, as a list. Anything but a string is returned as it is."""
    if not isinstance(sizes, str):
        return sizes
    words = [word.strip() for word in sizes.split(",") if word.strip()]
    return [int(word) if word.isdecimal() else word for word in words]


def _whole_error(kind: str, error: ConfigError) -> PydanticCustomError:
    """Return a pydantic error for `error`, whose message already names the setting.

    It has the nearest legal value of the first remedy; None means to leave the setting out.
    """
    nearest = {"nearest": error.remedies[0].value} if error.remedies else {}
    return PydanticCustomError(kind, "{message}", {"message": error.message, **nearest})
