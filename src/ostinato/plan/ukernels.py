"""The matmuls of a model, and the micro-kernel (`ops/ukernels.py`) that computes each for a number of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ostinato.ops.ukernels import KIND_TEXT, ROWS_OF, Choice, Op, Problem, Ukernel, Unit, candidates, select
from ostinato.plan.device.kernel_support import features
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.mixers import operations_of
from ostinato.plan.model import ModelSpec
from ostinato.plan.quantization import AnyQuantization, Quantization
from ostinato.plan.weights import Weight

SHOWN_TOKENS = (1, 8, 32, 512)
"""Numbers of tokens for which a report names the micro-kernels."""


@dataclass(frozen=True)
class Product:
    """A computation of a model that has micro-kernels: a matmul, the experts, the attention or the scan of a layer.

    `k` and `n` are the inputs and outputs of a matmul, 0 where there are none. A matmul of rows in several formats is
    one product for each. Experts have two products, up and down; `layer` are the weights of both, `experts` their
    number and how many a token chooses; `group` the queries per key head. `lhs` is the type of the tokens, None: the
    model's.
    """

    name: str
    op: Op
    weights: tuple[str, ...]
    k: int = 0
    n: int = 0
    layer: tuple[str, ...] = ()
    experts: tuple[int, int] = (1, 1)
    group: int = 1
    lhs: str | None = None

    def __str__(self) -> str:
        size = f"{self.k} x {self.n}, " if self.k else ""
        weights = " and ".join(dict.fromkeys(KIND_TEXT.get(kind, kind) for kind in self.weights))
        weights += "" if self.lhs is None else f", tokens {self.lhs}"
        return f"{self.name} ({size}{weights})"

    def m(self, unit: Unit, tokens: int) -> int:
        """Return the row's m at `tokens` tokens: of one row of a batch for attention, spread evenly over experts."""
        num_experts, top_k = self.experts
        if unit in ("queries per key head", "query rows"):
            return tokens * self.group
        return tokens * top_k // num_experts if unit == "mean per expert" else -(-tokens * top_k // num_experts)


def products_of(model: ModelSpec, kv_cache_dtype: str | None = None) -> tuple[Product, ...]:
    """Return the distinct products of a model, its drafter and its image encoder, in the order of the layers."""
    places = [f"{model.backbone}layers.{i}" for i in range(len(model.layers))]
    products = list(_of_layers(model.layers, places, model.quantization, kv_cache_dtype))
    vision = () if model.vision is None else model.vision.weights
    products += _of_outer([*model.weights, *vision], model.quantization)
    drafter = model.drafter
    if drafter is not None and drafter.model is not None:
        products += products_of(drafter.model, kv_cache_dtype)
    elif drafter is not None:
        products += _of_layers(drafter.layers, drafter.places, drafter.quantization, kv_cache_dtype)
        products += _of_outer(drafter.weights, drafter.quantization)
    return tuple(dict.fromkeys(products))


def _of_outer(weights: Iterable[Weight], quantization: AnyQuantization | None) -> Iterator[Product]:
    """Yield the products with matrices outside the layers."""
    for weight in weights:
        if weight.is_lm_head or weight.role == "linear":
            yield from _of_matrix(weight, quantization)


def _of_layers(
    layers: Sequence[LayerSpec],
    places: Sequence[str],
    quantization: AnyQuantization | None,
    kv_cache_dtype: str | None,
) -> Iterator[Product]:
    """Yield the products of layers; `places` are the checkpoint's names of them, by which weights are quantised."""
    for place, layer in zip(places, layers, strict=True):
        for weight in layer.weights:  # `shared_weights` are those of another layer, under its name
            if weight.role == "linear":
                yield from _of_matrix(weight.with_prefix(f"{place}."), quantization)
        if layer.experts is not None and layer.expert_weights:
            stacks = [weight.with_prefix(f"{place}.") for weight in layer.expert_weights]
            kinds = tuple(kind for weight in stacks for kind, _ in _kinds(weight, quantization))
            experts = layer.experts
            for name, kind, k, n in (
                ("up", kinds[0], experts.size, experts.inner_size),
                ("down", kinds[-1], experts.intermediate_size, experts.size),
            ):
                yield Product(f"experts, {name}", "moe", (kind,), k, n, kinds, (experts.num_experts, experts.top_k))
        if layer.attention is not None and layer.attention.operation != "selected_attention":  # it has no kernel
            keys = "s8_row" if kv_cache_dtype == "int8" else "same"
            group = layer.attention.num_heads // layer.attention.num_kv_heads
            name = "attention" if layer.attention.indexer is None else "attention to selected blocks"
            yield Product(name, layer.attention.operation, (keys,), group=group)
        if "ssd_scan" in operations_of(layer.mixer):
            yield Product("scan of prompts", "ssd_scan", ("same",))


def _of_matrix(weight: Weight, quantization: AnyQuantization | None) -> Iterator[Product]:
    name = "LM head" if weight.is_lm_head else " + ".join(_last_words(name) for name in weight.names)
    takes_int8 = isinstance(quantization, Quantization) and quantization.quantises_inputs(weight)
    for kind, rows in _kinds(weight, quantization):
        yield Product(name, "linear", (kind,), weight.in_size, rows, lhs="int8" if takes_int8 else None)


def _last_words(name: str) -> str:
    return ".".join(name.removesuffix(".weight").split(".")[-2:])


def _kinds(weight: Weight, quantization: AnyQuantization | None) -> tuple[tuple[str, int], ...]:
    """Return the kinds of a weight's rows (`ops/ukernels.py`), and how many there are of each."""
    if quantization is None or not quantization.quantises(weight):
        return (("same", weight.shape[-2]),)
    if isinstance(quantization, Quantization):
        return (("s8_row" if quantization.group_size is None else "s8_group", weight.shape[-2]),)
    return quantization.blocks_of(weight) or ()


def rows_of_model(
    model: ModelSpec, dtype: str, isa: str, deterministic: bool = False, kv_cache_dtype: str | None = None
) -> dict[str, tuple[Ukernel, ...]]:
    """Return the rows that may compute the model's products in a module, by operation, in the table's order."""
    used = {
        row
        for product in products_of(model, kv_cache_dtype)
        for problem in _problems(product, dtype, deterministic)
        for row in candidates(problem, features(isa))
    }
    return {op: tuple(row for row in rows if row in used) for op, rows in ROWS_OF.items() if used.intersection(rows)}


def choose_row(product: Product, dtype: str, isa: str, deterministic: bool, tokens: int) -> Choice:
    """Return the row that computes a product at `tokens` tokens, and why the rows before it do not.

    Experts that are multiplied one by one take a row of `linear`.
    """
    declined: list[tuple[Ukernel, str]] = []
    for problem in _problems(product, dtype, deterministic):
        choice = select(problem, features(isa), lambda unit: product.m(unit, tokens))
        declined += choice.declined
        if choice.row.driver != "MOE_BY_EXPERT":
            break
    return Choice(choice.row, tuple(declined))


@dataclass(frozen=True)
class ProductRows:
    """A product with the row that computes it, for each of `SHOWN_TOKENS`."""

    product: Product
    tokens: dict[int, Choice]

    @property
    def spans(self) -> tuple[tuple[str, Choice], ...]:
        """Choices with the numbers of tokens that share one, such as `8, 32`."""
        rows = dict.fromkeys(choice.row for choice in self.tokens.values())
        shared = [[tokens for tokens, choice in self.tokens.items() if choice.row == row] for row in rows]
        return tuple((", ".join(map(str, tokens)), self.tokens[tokens[0]]) for tokens in shared)


def explain_rows(
    model: ModelSpec, dtype: str, isa: str, deterministic: bool, kv_cache_dtype: str | None = None
) -> tuple[ProductRows, ...]:
    """Return all products of a model with their rows."""
    return tuple(
        ProductRows(each, {n: choose_row(each, dtype, isa, deterministic, n) for n in SHOWN_TOKENS})
        for each in products_of(model, kv_cache_dtype)
    )


def _problems(product: Product, dtype: str, deterministic: bool) -> list[Problem]:
    """Return the problem of a product; for experts that of the layer, then that of one expert."""
    lhs = product.lhs or dtype
    if product.op != "moe":
        return [Problem(product.op, lhs, product.weights, product.k, deterministic)]
    layer = Problem("moe", lhs, product.layer, product.k, deterministic)
    return [layer, Problem("linear", lhs, product.weights, product.k, deterministic)]
