"""Names by which engines and fronts of one application find each other on a Ray."""

from __future__ import annotations

import re

NAMESPACE = "ostinato"
"""Ray's namespace of the engines' actors."""


def app_name(model_name: str) -> str:
    """Return the name of the application that serves a model: letters, digits and dashes."""
    return f"ostinato-{re.sub('[^A-Za-z0-9]+', '-', model_name).strip('-').lower() or 'model'}"


def actor_prefix(app: str) -> str:
    """Return the prefix of the names of an application's engines."""
    return f"{app}:engine:"
