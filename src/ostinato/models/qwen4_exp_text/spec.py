"""Qwen4, its text model: delta nets and indexed attention with experts, streams of residuals, n-gram embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import isqrt

from ostinato.errors import ModelError
from ostinato.json_io import JsonMapping, JsonObject
from ostinato.models.config_json import (
    activation,
    attention_spec,
    flag,
    integer,
    number,
    parse_rope,
    shared_fields,
    spec_of_text,
    text_of_kind,
)
from ostinato.models.qwen3_5_text.spec import HEAD_COUNTS, delta_net, mixed_layers
from ostinato.models.qwen3_5_text.spec import KINDS as WITHOUT_INDEXER
from ostinato.models.qwen3_next.spec import experts_spec
from ostinato.ops.seeds import GOLDEN, MASK64, mix64
from ostinato.ops.sizes import TOKEN_DIGITS
from ostinato.plan.layer_specs import IndexerSpec, LayerSpec
from ostinato.plan.mixers import NgramDeltaSpec, NgramSpec
from ostinato.plan.model import ModelSpec

IMAGES_LEFT_OUT = "the encoder of images is not run; requests are text"
KINDS = {**WITHOUT_INDEXER, "indexed_attention": "attention"}
"""Kinds of layers by the values of `layer_types`."""
MAX_PARTS = 16_384
"""Largest number of tensors of all tables."""
MAX_ROWS, MAX_SEED = 2**31, 2**63
"""Largest number of rows of a head, and seed of the hashes."""
MAX_HEADS = 4096
"""Largest number of their heads: each has a prime, which is searched."""
MAX_STREAMS = 64
"""Largest number of residual streams: each has operations of its own in every layer."""


@dataclass(frozen=True)
class Qwen4Hyperparameters:
    """Hyperparameters of models/qwen4_exp_text/model.py, besides the layers."""

    shared_size: int
    """Number of inner activations of the shared expert."""
    normalizes: bool
    """True if the weights of the chosen experts add up to 1."""
    attention_bias: bool
    norm_eps: float
    streams: int
    """Residual streams of the hyper-connections."""
    rank: int
    """Rank of their mix."""
    gate_is_sigmoid: bool
    """True if the gate after a delta net is a sigmoid; else it is SiLU."""


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `qwen4_exp_text` config.json."""
    act = activation(config, "hidden_act", "silu", ("silu",))
    gate = activation(config, "output_gate_type", act, ("silu", "sigmoid"))
    attention = replace(attention_spec({"num_key_value_heads": 2, **config}, 256), indexer=_indexer(config))
    rope = parse_rope(config, attention.head_dim, default_partial=1.0)
    shared, experts = shared_fields(config), experts_spec(config)
    hidden, streams = shared["hidden_size"], integer(config, "hc_count", 4, MAX_STREAMS, least=2)
    kinds = mixed_layers(config, KINDS)
    if "attention" in kinds and attention.indexer is None:
        raise ModelError("config.json has attention without an indexer; indexer_n_heads and its kin are needed")
    if attention.indexer is not None and rope.rotary_dim > attention.indexer.head_dim:
        raise ModelError(
            f"config.json rotates {rope.rotary_dim} elements of heads, more than indexer_head_dim = "
            f"{attention.indexer.head_dim}"
        )
    with_ngrams = _ngram_layers(config, kinds)
    embeddings = dict(zip(with_ngrams, _ngrams(config, len(with_ngrams), hidden, streams), strict=True))
    plain = delta_net(config)
    layers = []
    for i, kind in enumerate(kinds):
        if kind == "attention":
            layers.append(LayerSpec("attention", attention, experts=experts))
        elif i in embeddings:
            mixer = NgramDeltaSpec(**vars(plain), ngrams=embeddings[i])
            layers.append(LayerSpec("ngram_delta_net", mixer=mixer, experts=experts))
        else:
            layers.append(LayerSpec("delta_net", mixer=plain, experts=experts))
    return ModelSpec(
        architecture="qwen4_exp_text",
        **shared,
        layers=tuple(layers),
        rope=rope,
        hyperparameters=Qwen4Hyperparameters(
            shared_size=integer(config, "shared_expert_intermediate_size", 512),
            normalizes=flag(config, "norm_topk_prob", True),
            attention_bias=flag(config, "attention_bias", False),
            norm_eps=number(config, "rms_norm_eps", 1e-6),
            streams=streams,
            rank=integer(config, "hc_lowrank", 320),
            gate_is_sigmoid=gate == "sigmoid",
        ),
        sharded_dims=("shared_size",),
        num_streams=streams,
        left_out=head_left_out(config),
    )


def qwen4_exp_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of the text part of a `qwen4_exp` config.json. ModelError as for `qwen4_exp_text`."""
    left_out = "; ".join(filter(None, (IMAGES_LEFT_OUT, head_left_out(text_of_kind(config, "qwen4_exp_text")))))
    return spec_of_text(config, model_spec, "qwen4_exp", left_out, default_tied=False)


def head_left_out(config: JsonMapping) -> str | None:
    """Return that the prediction head is not run, None if config.json mentions none."""
    has_head = any(integer(config, name, 0) for name in HEAD_COUNTS)
    return "the prediction head is not run" if has_head else None


def _indexer(config: JsonMapping) -> IndexerSpec | None:
    names = ("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")
    if all(config.get(name) is None for name in names):
        return None
    heads, kv_heads, head_dim, budget, ratio = (integer(config, name) for name in names)
    if kv_heads != 1 or min(heads, head_dim, budget, ratio) < 1 or budget % ratio:
        raise ModelError(
            f"config.json has an indexer of {heads} heads of {head_dim} with {kv_heads} heads of keys, which selects "
            f"{budget} tokens in blocks of {ratio}; supported: one head of keys, and whole blocks"
        )
    return IndexerSpec(heads, head_dim, budget, ratio)


def _ngram_layers(config: JsonMapping, kinds: tuple[str, ...]) -> list[int]:
    """Return the layers with an n-gram embedding, which config.json counts from 1."""
    ids = config.get("ple_layer_ids") or []
    if not isinstance(ids, list) or not all(type(number) is int and 1 <= number <= len(kinds) for number in ids):
        raise ModelError(
            f"config.json has ple_layer_ids = {ids!r}, which should be numbers of layers, 1 to {len(kinds)}"
        )
    layers = sorted({number - 1 for number in ids})
    if any(kinds[layer] != "delta_net" for layer in layers):
        raise ModelError(f"config.json has ple_layer_ids = {ids!r}; supported: layers with linear attention")
    return layers


def _ngrams(config: JsonMapping, count: int, hidden: int, streams: int) -> Iterator[NgramSpec]:
    """Yield the n-gram embeddings of `count` layers, whose hashes and tables differ."""
    if not count:
        return
    n, heads = integer(config, "ngram_size", 3), integer(config, "heads_per_ngram", 8)
    width, embed_dim = integer(config, "ple_conv_kernel_size", 4), integer(config, "ple_embed_dim", hidden)
    vocab, parts = integer(config, "vocab_size"), integer(config, "split_ngram_parts", 512)
    base, unit = (
        integer(config, "ngram_vocab_size_base", 20_000_000, MAX_ROWS),
        integer(config, "make_ngram_vocab_size_divisible_by", 128),
    )
    num_heads = (n - 1) * heads
    if n < 2 or heads < 1 or width < 2 or base < 1 or unit < 1 or embed_dim < 1 or embed_dim % num_heads:
        raise ModelError(
            f"config.json has n-grams up to ngram_size = {n} with {heads} heads each, of ple_embed_dim = {embed_dim} "
            f"in tables of {base} rows padded to {unit}, and ple_conv_kernel_size = {width}; heads should divide the "
            "dimension, and n and the kernel be 2 or more"
        )
    if not 1 <= parts * count <= MAX_PARTS or num_heads * count > MAX_HEADS:
        raise ModelError(
            f"config.json has {count} layers with n-grams in split_ngram_parts = {parts} and {num_heads} heads each; "
            f"supported: 1 to {MAX_PARTS:,} parts and up to {MAX_HEADS:,} heads of all layers"
        )
    assert vocab <= 256**TOKEN_DIGITS, "no vocabulary is so large that a slot could not keep its ids"
    end = config.get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    if type(end) is not int or not 0 <= end < vocab:
        raise ModelError(f"config.json has eos_token_id = {end!r}; n-grams need a token that ends a text")
    primes = _primes(base)
    for place in range(count):
        sizes = tuple(next(primes) for _ in range(num_heads))
        yield NgramSpec(
            multipliers=_multipliers(integer(config, "seed", 1234, MAX_SEED), place, n, vocab),
            sizes=sizes,
            table_rows=-(-sum(sizes) // unit) * unit,
            parts=parts,
            embed_dim=embed_dim,
            end_id=end,
            streams=streams,
            hidden_size=hidden,
            width=width,
        )


def _primes(first: int) -> Iterator[int]:
    """Yield the primes from `first` on."""
    number = max(first, 2)
    while True:
        if number == 2 or (number % 2 and all(number % divisor for divisor in range(3, isqrt(number) + 1, 2))):
            yield number
        number += 1


SEED_OF_LAYER = 10007


def _multipliers(seed: int, layer: int, n: int, vocab: int) -> tuple[int, ...]:
    """Return the odd multipliers of the hash, such that no product with a token id exceeds 63 bits.

    They are drawn by SplitMix64 (Steele et al. 2014), from a seed for each of the layers with n-grams.
    """
    most = max(1, (2**63 - 1) // max(vocab, 1) // 2)
    state = seed + SEED_OF_LAYER * layer
    return tuple(2 * (mix64(state + GOLDEN * (i + 1) & MASK64) % most) + 1 for i in range(1, n + 1))
