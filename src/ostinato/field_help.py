"""Help texts of classes whose settings are pydantic fields, for `help()`."""

from __future__ import annotations

import textwrap
from typing import TypeVar

from pydantic import BaseModel

Model = TypeVar("Model", bound=BaseModel)


def describe_fields(model: type[Model]) -> type[Model]:
    """Add each field with its default and description to the docstring, which is all that `help()` shows of it."""
    lines = ["", "", "Fields:", ""]
    for name, field in model.model_fields.items():
        default = "" if field.is_required() else f" = {field.get_default(call_default_factory=True)!r}"
        lines.append(f"{name}{default}")
        lines += textwrap.wrap(field.description or "", 100, initial_indent="    ", subsequent_indent="    ")
    model.__doc__ = textwrap.dedent(f"    {model.__doc__}").rstrip() + "\n".join(lines)
    return model
