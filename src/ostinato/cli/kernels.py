"""`ostinato kernels`: the micro-kernels of this CPU, and the one that each product of a model takes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated

import typer

from ostinato.cli.flags import Model, check_model, engine_options, name_model
from ostinato.errors import ConfigError
from ostinato.json_io import JsonObject
from ostinato.ops.ukernels import ALL_WEIGHTS, BLOCKS, INTEGER_BLOCKS, ROWS, Choice, Ukernel
from ostinato.plan.device.detect import detect
from ostinato.plan.device.isa_table import TABLE
from ostinato.plan.device.kernel_support import NativeFacts, features
from ostinato.plan.fitting.resolve import resolve_config
from ostinato.plan.ukernels import Product, ProductRows, explain_rows


@engine_options
def kernels(
    settings: JsonObject,
    target: Model = None,
    isa: Annotated[
        str | None, typer.Option(metavar="NAME", help="Rows of another CPU's module, such as x86_64_v3.")
    ] = None,
    why: Annotated[bool, typer.Option("--why", help="Also print the measurement behind each range of m.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show the micro-kernels of this CPU, and which one each product of a model takes.

    Without MODEL: the rows of the table that this CPU's module has. With MODEL: for each of its products, the kernel at
    m = 1, 8, 32 and 512 tokens, and why the kernels before it are not taken. Nothing is loaded.

    Example: ostinato kernels demo --quantization int8
    """
    module = _module(isa)
    if target is None and "model" not in settings:
        rows = [row for row in ROWS if row.runs_on(features(module))]
        if as_json:
            print(json.dumps({"module": module, "rows": [_row_data(row) for row in rows]}, indent=2))
        else:
            _print_rows(module, rows, why)
        return
    name_model(settings, target)
    config, spec = check_model(settings, plans=False)
    device = detect("cpu")
    settled = resolve_config(config, spec, replace(device, native=NativeFacts(module, "it is asked for")))
    rows_of_products = explain_rows(settled.model, settled.dtype, module, config.deterministic, settled.kv_cache_dtype)
    if as_json:
        products = [_product_data(each) for each in rows_of_products]
        print(json.dumps({"module": module, "dtype": settled.dtype, "products": products}, indent=2))
        return
    print(f"module {module}, tokens in {settled.dtype}")
    _print_products(rows_of_products, module, why)


def _module(isa: str | None) -> str:
    """Return the module that the plan chooses here, or `isa`. ConfigError if there is none of that name."""
    known = [row.name for rows in TABLE.values() for row in rows]
    if isa is not None and isa not in known:
        raise ConfigError(f"--isa {isa!r} is no module of kernels; they are {', '.join(known)}")
    facts = detect("cpu").native
    if isa is None and facts.isa is None:
        raise ConfigError(f"there are no native kernels here: {facts.reason}; --isa NAME shows those of another CPU")
    return isa or str(facts.isa)


def _row_data(row: Ukernel) -> JsonObject:
    data = {name: sorted(value) if isinstance(value, frozenset) else value for name, value in vars(row).items()}
    return data | {"modules": {name: sorted(value) for name, value in row.modules._asdict().items()}}


def _product_data(rows: ProductRows) -> JsonObject:
    chosen = {
        str(tokens): {
            "row": choice.row.name,
            "declined": [{"row": row.name, "reason": reason} for row, reason in choice.declined],
        }
        for tokens, choice in rows.tokens.items()
    }
    return {**vars(rows.product), "tokens": chosen}


def _print_rows(module: str, rows: list[Ukernel], why: bool) -> None:
    print(f"micro-kernels of {module}, in the order in which they are tried")
    for row in rows:
        fixed = ", also with --deterministic" if row.fixed_order else ""
        print(f"{row.name}\n  m: {row.m_range} {row.unit}; tokens in {', '.join(sorted(row.lhs))}{fixed}")
        print(f"  weights: {_kinds_text(row.rhs)}")
        if why and row.why:
            print(f"  why: {row.why}")


def _kinds_text(kinds: frozenset[str]) -> str:
    groups = {"all": ALL_WEIGHTS, "blocks": BLOCKS, "blocks but float8 and MXFP4": INTEGER_BLOCKS}
    named = next((name for name, group in groups.items() if kinds == group), None)
    if named is not None:
        return named
    left_out = BLOCKS - kinds
    if len(left_out) < len(BLOCKS) / 2:
        return ", ".join(
            [*sorted(kinds - BLOCKS), f"blocks but {', '.join(sorted(left_out))}" if left_out else "blocks"]
        )
    return ", ".join(sorted(kinds))


def _print_products(products: tuple[ProductRows, ...], isa: str, why: bool) -> None:
    for each in products:
        print(each.product)
        for tokens, choice in each.spans:
            print(f"  m = {tokens}: {choice.row.name}")
            if why and choice.row.why:
                print(f"    {choice.row.why}")
            for reason, names in _reasons(choice, each.product, isa).items():
                print(f"    not {', '.join(names)}: {reason}")


def _reasons(choice: Choice, product: Product, isa: str) -> dict[str, list[str]]:
    """Return the kernels that a module has and that come before the chosen one, by the reason why they decline.

    A kernel may have several rows. Its reason is that of the last row that takes the product's weights, if one does.
    """
    by_name: dict[str, str] = {}
    for row, reason in choice.declined:
        is_other = row.name != choice.row.name and row.runs_on(features(isa))
        if is_other and (row.name not in by_name or row.rhs.issuperset(product.weights)):
            by_name[row.name] = reason
    reasons: dict[str, list[str]] = {}
    for name, reason in by_name.items():
        reasons.setdefault(reason, []).append(name)
    return reasons
