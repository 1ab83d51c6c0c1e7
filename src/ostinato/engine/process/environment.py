"""Environment of processes that belong to this one."""

from __future__ import annotations

import os
import sys

SECRET_VARIABLES = {"api_key": "OSTINATO_API_KEY", "ssl_keyfile_password": "OSTINATO_SSL_KEYFILE_PASSWORD"}
"""Setting -> an environment variable that is for the server alone: its processes do not get it."""


def child_environment() -> dict[str, str]:
    """Return the environment of a process that belongs to this one: the same module paths, and no secrets."""
    secrets = SECRET_VARIABLES.values()
    environment = {name: value for name, value in os.environ.items() if name not in secrets}
    return {**environment, "PYTHONPATH": os.pathsep.join(each or os.getcwd() for each in sys.path)}
