"""Measurements as they come: a file with a JSON line for each, so that a run that was cut off goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Key = tuple[int, str, str]
"""Round, model, engine."""


class Record:
    """The measurements in `path`, whose first line is the `setup` under which they were made.

    ValueError if there are measurements of another setup.
    """

    def __init__(self, path: Path, setup: dict[str, Any]) -> None:
        self._path = path
        self.measurements: dict[Key, dict[str, Any]] = {}
        setup = json.loads(json.dumps(setup))
        if path.exists():
            first, *rest = _whole_lines(path)
            if first != setup:
                raise ValueError(f"{path} holds measurements of another set-up, {first}; name another folder")
            for line in rest:
                self._keep(line)
            # A line that was cut off would swallow the next one.
            path.write_text("".join(json.dumps(line) + "\n" for line in [first, *rest]), encoding="utf-8")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(setup) + "\n", encoding="utf-8")

    def is_done(self, key: Key) -> bool:
        """Whether it was measured; one that failed is tried again by the next run."""
        return "figures" in self.measurements.get(key, {})

    def add(self, measurement: dict[str, Any]) -> None:
        self._keep(measurement)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(measurement) + "\n")

    def _keep(self, measurement: dict[str, Any]) -> None:
        self.measurements[measurement["round"], measurement["model"], measurement["engine"]] = measurement


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return lines or [{}]
