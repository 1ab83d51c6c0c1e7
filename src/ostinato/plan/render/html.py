"""HTML for notebooks: names with values as tables, without styles of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from html import escape

from ostinato.json_io import JsonMapping
from ostinato.plan.limits import Limits
from ostinato.units import format_bytes

_CELL = "text-align: left; vertical-align: top; white-space: pre-wrap"


def table(rows: Iterable[tuple[str, str]]) -> str:
    """Return a table of names and their values, which are plain text."""
    cells = (f'<tr><th style="{_CELL}">{escape(n)}</th><td style="{_CELL}">{escape(v)}</td></tr>' for n, v in rows)
    return f"<table>{''.join(cells)}</table>"


def folded(title: str, inner: str) -> str:
    """Return HTML that unfolds with a click."""
    return f"<details><summary>{escape(title)}</summary>{inner}</details>"


def plan_html(plan: JsonMapping) -> str:
    """Return a plan's JSON as HTML: a short summary with memory and decisions; everything else is folded."""
    model, device, memory = plan["model"], plan["device"], plan["memory"]
    about = (
        f"{model['architecture']}, {model['parameters']:,} parameters, {plan['settings']['dtype']} on {device['name']}"
    )
    rows = [(field.name, f"{plan['settings'][field.name]:,}") for field in fields(Limits)]
    rows += [(name, format_bytes(memory[name])) for name in ("weights", "activations")]
    rows += [(name, f"{memory[f'num_{name}']:,}") for name in ("blocks", "slots")]
    decisions = [
        (decision["topic"], f"{decision['requested']} -> {decision['effective']}: {decision['reason']}")
        for decision in plan["decisions"]
    ]
    sections = [
        folded(name, table(_flat(section)))
        for name, section in plan.items()
        if isinstance(section, Mapping) and section
    ]
    return f"<b>{escape(about)}</b>{table(rows)}{folded('decisions', table(decisions))}{''.join(sections)}"


def _flat(values: Mapping[str, object], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Yield names and values as text; those of inner mappings as `outer.inner`."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", f"{value:,}" if type(value) is int else str(value)
