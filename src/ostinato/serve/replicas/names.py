"""How engines and fronts of one application find each other on a Ray."""

from __future__ import annotations

import re

NAMESPACE = "ostinato"
"""Ray's namespace of the engines' actors."""


def app_name(model_name: str) -> str:
    """The application that serves a model: letters, digits and dashes."""
    return f"ostinato-{re.sub('[^A-Za-z0-9]+', '-', model_name).strip('-').lower() or 'model'}"


def actor_prefix(app: str) -> str:
    """The names of an application's engines begin with it."""
    return f"{app}:engine:"
