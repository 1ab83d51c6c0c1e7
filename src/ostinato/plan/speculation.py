"""Plan of speculation: the drafter, the methods that a model supports, its weights, memory and graphs.

The drafter's graphs are like those of the model, for one token per row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ostinato.config import EngineConfig
from ostinato.config_fields import Speculative
from ostinato.errors import ConfigError, Remedy
from ostinato.plan.decision import Decision, no_effect
from ostinato.plan.graphs.capture_plan import CapturePlan
from ostinato.plan.graphs.capture_sizes import CaptureSizes, draft_numbers
from ostinato.plan.graphs.coverage import coverage
from ostinato.plan.memory.split import kv_block_bytes, slots_per_request, state_slot_bytes
from ostinato.plan.model import DrafterMethod, DrafterSpec, ModelSpec
from ostinato.plan.quantization import AnyQuantization
from ostinato.plan.rope import LayerRope, resolve_ropes
from ostinato.plan.tensor_parallel import sharding_problems


def draft_capture(
    capture: CapturePlan, method: DrafterMethod, max_num_seqs: int, max_num_batched_tokens: int
) -> CapturePlan:
    """Return the graphs of a prediction head, of an assistant or of a draft model.

    The first two run on decode rows alone, a draft model on all tokens. `capture` is the model's own plan. The first
    two have full graphs where the model has, and no others.
    """
    is_head = method != "draft"
    ladders = CaptureSizes((), capture.rows) if is_head else capture.ladders()
    most_tokens = max_num_seqs if is_head else max_num_batched_tokens
    return replace(
        capture,
        tokens=ladders.tokens,
        rows=ladders.rows,
        tokens_per_row=(1,),
        splits=() if is_head else capture.splits,
        coverage=coverage(ladders, capture.graph_mode, max_num_seqs=max_num_seqs, max_num_batched_tokens=most_tokens),
        uncovered=(),
        time=None,
    )


Method = Literal["ngram", "mtp", "draft"]


@dataclass(frozen=True)
class SpeculativePlan:
    """Method of drafting, and what the drafter adds to the model's sizes; the additions are 0 without a drafter.

    The method is `assistant` if the second model of method `draft` is one.

    `weights` are bytes in all, `kv_block` those of one block, `state_slot` those of one slot. `model`, `quantization`
    and `ropes` (as resolved for `max_model_len`) are a draft model's, `architecture` is the drafter's, and the
    `prompt_lookup_*` are those of method `ngram`; each is None or empty elsewhere.
    """

    method: Method | DrafterMethod
    num_speculative_tokens: int
    adaptive: bool
    slots_per_request: int
    model: str | None
    architecture: str | None
    parameters: int
    weights: int
    quantization: AnyQuantization | None
    kv_block: int
    state_slot: int
    ropes: tuple[LayerRope, ...]
    prompt_lookup_max: int | None
    prompt_lookup_min: int | None
    reason: str

    @property
    def draft_numbers(self) -> tuple[int, ...]:
        """Numbers of drafts per row that a step may have."""
        return draft_numbers(self.num_speculative_tokens, self.adaptive)


def available_methods(model: ModelSpec) -> tuple[Method, ...]:
    """Return the methods that a model supports, `draft` with a second checkpoint."""
    return ("ngram", "mtp", "draft") if _why_no_head(model) is None else ("ngram", "draft")


def with_drafter(config: EngineConfig, model: ModelSpec, draft: ModelSpec | None = None) -> ModelSpec:
    """Return `model` with the drafter that `config` asks for, None if the method needs none.

    `draft` is the second model of method `draft`; without it, the drafter that is attached already. ConfigError if the
    model does not support the method, or the draft model has another vocabulary, an encoder of images, or prompts seen
    in both directions, or is an assistant of other models.
    """
    speculative = config.speculative
    if speculative is None or speculative.method == "ngram":
        return replace(model, drafter=None)
    if speculative.method == "mtp":
        problem = _why_no_head(model)
        if problem is not None:
            ngram = Remedy("speculative", f"ngram:{speculative.num_speculative_tokens}")
            methods = ", ".join(available_methods(model))
            raise ConfigError(f"speculative mtp: {problem}; methods that it can do: {methods}", [ngram])
        return replace(model, drafter=model.head)
    if draft is None and model.drafter is not None:
        if model.drafter.method == "assistant":
            return model
        draft = model.drafter.model
    assert draft is not None, "method draft needs the draft model's spec"
    if draft.vision is not None:
        raise ConfigError(
            f"speculative: the draft model {speculative.model!r} has an encoder of images; give one of text alone",
            [Remedy("speculative", f"ngram:{speculative.num_speculative_tokens}")],
        )
    if draft.is_prefix_lm and not model.is_prefix_lm:
        raise ConfigError(
            f"speculative: the tokens of the draft model {speculative.model!r} see later ones of the prompt "
            "(prefix_lm), and this model's prompts are computed in parts; give one with causal prompts",
            [Remedy("speculative", f"ngram:{speculative.num_speculative_tokens}")],
        )
    if draft.vocab_size != model.vocab_size:
        raise _other_vocabulary(speculative, model, draft)
    if draft.target is not None:
        return replace(model, drafter=_assistant(speculative, model, draft))
    drafter = DrafterSpec("draft", draft.layers, 0, draft.weights, draft.ops, draft)
    return replace(model, drafter=drafter)


def plan_speculation(
    config: EngineConfig, model: ModelSpec, dtype: str, ssm_state_dtype: str, kv_cache_dtype: str, max_model_len: int
) -> tuple[SpeculativePlan | None, list[Decision]]:
    """Return the plan of speculation and decisions on it; the plan is None without speculation.

    The model must have its drafter; it runs in these dtypes.
    """
    speculative = config.speculative
    if speculative is None:
        idle = no_effect(config, "speculative_adaptive", "speculative is open")
        return None, [idle] if config.is_given("speculative_adaptive") else []
    target, drafter = replace(model, drafter=None), model.drafter
    draft = None if drafter is None else drafter.model
    decisions: list[Decision] = []
    ropes: tuple[LayerRope, ...] = ()
    if draft is not None:
        decisions += _draft_decisions(draft, dtype, ssm_state_dtype, max_model_len)
        resolved, of_ropes = resolve_ropes(draft.ropes, max_model_len)
        ropes = draft.with_layers(resolved)
        decisions += [replace(decision, topic="draft.rope") for decision in of_ropes]
    is_ngram = speculative.method == "ngram"
    plan = SpeculativePlan(
        method=speculative.method if drafter is None else drafter.method,
        num_speculative_tokens=speculative.num_speculative_tokens,
        adaptive=config.speculative_adaptive == "on",
        slots_per_request=slots_per_request(speculative.num_speculative_tokens),
        model=speculative.model,
        architecture=None if drafter is None else (draft or model).architecture,
        parameters=0 if drafter is None else drafter.num_parameters,
        weights=0 if drafter is None else drafter.weight_bytes(dtype),
        quantization=None if draft is None else draft.quantization,
        kv_block=kv_block_bytes(model, config.block_size, kv_cache_dtype)
        - kv_block_bytes(target, config.block_size, kv_cache_dtype),
        state_slot=state_slot_bytes(model, dtype, ssm_state_dtype) - state_slot_bytes(target, dtype, ssm_state_dtype),
        ropes=ropes,
        prompt_lookup_max=speculative.prompt_lookup_max if is_ngram else None,
        prompt_lookup_min=speculative.prompt_lookup_min if is_ngram else None,
        reason=_reason(speculative, drafter),
    )
    return plan, decisions


def _why_no_head(model: ModelSpec) -> str | None:
    """Return why the model cannot draft with its own head; None if it can."""
    if model.head is None:
        return "the model has no prediction head"
    if any(layer.mixer is not None for layer in model.head.layers):
        return "the model's prediction head has state layers, which cannot draft yet"
    return None


def _other_vocabulary(speculative: Speculative, model: ModelSpec, draft: ModelSpec) -> ConfigError:
    message = (
        f"the draft model {speculative.model} has a vocabulary of {draft.vocab_size} tokens, and the model one of "
        f"{model.vocab_size}; a draft model's is the same"
    )
    return ConfigError(message, _other_methods(speculative, model))


def _other_methods(speculative: Speculative, model: ModelSpec) -> list[Remedy]:
    """Return the methods that need no second model."""
    count, others = speculative.num_speculative_tokens, available_methods(model)
    return [Remedy("speculative", f"{method}:{count}") for method in others if method != "draft"]


def _assistant(speculative: Speculative, model: ModelSpec, draft: ModelSpec) -> DrafterSpec:
    """Return the assistant `draft` as the drafter of `model`. ConfigError if it is not made for such a model."""
    problem = _why_no_assistant(model, draft)
    if problem is not None:
        message = f"speculative: the draft model {speculative.model!r} is an assistant, which {problem}"
        raise ConfigError(message, _other_methods(speculative, model))
    places = _last_stored(model)
    layers = tuple(
        replace(layer, attention=replace(layer.attention, keys_of=places[layer.attention.rope]))
        for layer in draft.layers
        if layer.attention is not None
    )
    return DrafterSpec("assistant", layers, model.hidden_size, draft.weights, draft.ops, replace(draft, layers=layers))


def _why_no_assistant(model: ModelSpec, draft: ModelSpec) -> str | None:
    """Return why an assistant cannot make drafts for the model; None if it can."""
    assert draft.target is not None, "an assistant has a target"
    if model.architecture not in draft.target.architectures:
        return f"makes drafts for {' and '.join(draft.target.architectures)}, and the model is {model.architecture}"
    if draft.target.hidden_size != model.hidden_size:
        return (
            f"starts from hidden states of {draft.target.hidden_size} elements (backbone_hidden_size), and the model's "
            f"have {model.hidden_size}"
        )
    if draft.ranks != model.ranks:
        problems = "; ".join(sharding_problems(draft, model.ranks)) or "its matrices would be quantised in another way"
        return f"{model.ranks} ranks (tensor_parallel_size) cannot share as they share the model's keys: {problems}"
    places = _last_stored(model)
    for attention in dict.fromkeys(layer.attention for layer in draft.layers if layer.attention is not None):
        kind = "layers without a window" if attention.window is None else "layers with a window"
        if attention.rope not in places:
            return f"reads keys of {kind}, of which the model stores none"
        stored = model.layers[places[attention.rope]].attention
        assert stored is not None, "it stores keys"
        sizes = [
            (each.num_kv_heads, each.head_dim, each.window and each.window + extra)
            for each, extra in ((attention, 1), (stored, 0))
        ]
        if sizes[0] != sizes[1]:
            own, of_model = (
                f"{heads} heads of {size}" + ("" if window is None else f" in a window of {window}")
                for heads, size, window in sizes
            )
            return f"reads keys of {own} in {kind}, and the model's have {of_model}"
    return None


def _last_stored(model: ModelSpec) -> dict[int, int]:
    """Return the number of the last layer that stores keys of its own, by the rotary embedding of its kind."""
    return {
        layer.attention.rope: number
        for number, layer in enumerate(model.layers)
        if layer.attention is not None and layer.attention.keys_of is None
    }


def _draft_decisions(draft: ModelSpec, dtype: str, ssm_state_dtype: str, max_model_len: int) -> list[Decision]:
    """Return the decisions where a draft model runs differently from its checkpoint."""
    decisions = []
    if draft.dtype != dtype:
        reason = "a draft model runs in the dtype of the model: its weights are converted while loading"
        decisions.append(Decision("draft.dtype", draft.dtype, dtype, reason))
    wish = draft.ssm_state_dtype or "float32"
    if draft.has_recurrence and wish != ssm_state_dtype:
        reason = "slots hold the states of both models, in one dtype"
        decisions.append(Decision("draft.ssm_state_dtype", wish, ssm_state_dtype, reason))
    longest = draft.max_position_embeddings
    if longest is not None and longest < max_model_len:
        reason = f"the draft model was made for {longest} tokens; beyond them its drafts may seldom be accepted"
        decisions.append(Decision("draft.max_model_len", longest, max_model_len, reason))
    return decisions


def _reason(speculative: Speculative, drafter: DrafterSpec | None) -> str:
    if speculative.method == "ngram":
        low, high = speculative.prompt_lookup_min, speculative.prompt_lookup_max
        words = f"{low} to {high}" if low < high else str(high)
        return f"drafts are what followed the last occurrence of the text's last {words} tokens"
    if speculative.method == "mtp":
        return "drafts come from the model's own prediction head, which is fed its own hidden state"
    if drafter is not None and drafter.method == "assistant":
        return f"drafts come from the assistant {speculative.model}, which reads the model's keys and values"
    return f"drafts come from the model {speculative.model}"
