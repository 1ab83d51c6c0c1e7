"""Writes docs/flags-of-other-engines.md from src/ostinato/other_engines.py.

Run it after a change there: python tools/other_engines_page.py
"""

from __future__ import annotations

import re
from pathlib import Path

from ostinato.other_engines import FLAG_EQUIVALENTS, REFUSED

PAGE = Path(__file__).parent.parent / "docs/flags-of-other-engines.md"
HEAD = """# Flags of other engines

A flag of vLLM, SGLang, TGI, llama.cpp or Ollama that has another name here is answered with ours. This is all that
`ostinato` knows of them. vLLM's names that work as they are: [all settings](settings.md). [Coming from
another engine](coming-from-vllm-or-llama-cpp.md) sorts them by what they are for. `tools/other_engines_page.py` makes
this page from the code.

"""


def page() -> str:
    known = [
        ("Another name", "here", {flag: _code(ours) for flag, ours in FLAG_EQUIVALENTS.items() if ours is not None}),
        ("Leave out", "here", {flag: "needs no flag" for flag, ours in FLAG_EQUIVALENTS.items() if ours is None}),
        ("No counterpart", "why", {flag: _code(why) for flag, why in REFUSED.items()}),
    ]
    return HEAD + "\n".join(_table(title, column, answers) for title, column, answers in known)


def _table(title: str, column: str, answers: dict[str, str]) -> str:
    """Flags with the same answer share a row."""
    rows: dict[str, list[str]] = {}
    for flag, answer in answers.items():
        rows.setdefault(answer, []).append(f"`{flag}`")
    lines = [f"| {', '.join(flags)} | {answer} |" for answer, flags in rows.items()]
    return "\n".join([f"## {title}", "", f"| theirs | {column} |", "|---|---|", *lines, ""])


def _code(answer: str) -> str:
    """Flags of ours as code, with the value that one has."""
    return re.sub(r"--[^,;)]+?(?= and |[,;)]|$| (?=[a-z]+ ))", r"`\g<0>`", answer)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
