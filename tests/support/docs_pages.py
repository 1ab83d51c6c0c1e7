"""The pages of the project and the blocks of code in them, with what each says about its test.

A block may have a comment before it:

    <!-- check: varies -->               numbers in its output stand for any numbers
    <!-- check: slow, 25 s -->           it runs in `make docs-check` only, and takes that long
    <!-- check: native -->               it runs where there are native kernels
    <!-- check: smollm2 -->              it runs where the file of that model is (ostinato fetch smollm2)
    <!-- check: no, minutes: reason -->  it does not run, for this reason

Output is compared line by line, empty lines aside. A line `...` stands for any number of lines, `...` within a line for
any text. A `text` block right behind a `python` block is what that prints.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "src/ostinato/demo/README.md", *ROOT.glob("docs/**/*.md")]
)
LANGUAGES = {"console", "python", "text", "json"}
_COMMENT = re.compile(r"<!-- check: (.+) -->")
_NUMBER = re.compile(r"\d[\d,.]*")


@dataclass
class Block:
    page: Path
    line: int
    """The number of its first line in the page."""
    language: str
    lines: list[str]
    check: str = ""
    """What the comment before it says."""
    output: list[str] = field(default_factory=list)
    """Of a `python` block, what it prints."""
    output_check: str = ""

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def flags(self) -> set[str]:
        return {word.strip() for word in self.check.split(",")}

    @property
    def is_run(self) -> bool:
        return self.language in ("console", "python") and "no" not in self.flags

    @property
    def commands(self) -> list[tuple[str, list[str]]]:
        """Of a `console` block: each command, and the lines that it prints."""
        found: list[tuple[str, list[str]]] = []
        lines = iter(self.lines)
        for line in lines:
            if not line.startswith("$ "):
                assert found, f"{self.name} begins with output"
                found[-1][1].append(line)
                continue
            command = line[2:]
            while not _is_whole(command):
                command += "\n" + next(lines)
            found.append((command, []))
        return found


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page, in their order, those that are outputs of others aside."""
    last: Block | None = None
    check, inside = "", None
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("```") and inside is None:
            inside = Block(page, number + 1, line[3:].strip(), [], check)
        elif line.startswith("```") and inside is not None:
            if inside.language == "text" and last is not None and last.language == "python":
                last.output, last.output_check = inside.lines, inside.check
                yield last
                last = None
            else:
                if last is not None:
                    yield last
                last = inside
            check, inside = "", None
        elif inside is not None:
            inside.lines.append(line)
        elif found := _COMMENT.fullmatch(line):
            check = found[1]
        elif line.strip():
            check = ""
            if last is not None:
                yield last
            last = None
    assert inside is None, f"{page} has a block without an end"
    if last is not None:
        yield last


def assert_printed(shown: list[str], printed: str, varies: bool, remarks: str = "") -> None:
    """What a command printed is what its page shows, with its remarks on stderr behind it or without them: those of a
    long command tell how far it is."""
    wanted = [line.rstrip() for line in shown if line.strip()]
    pattern = "".join(r"(?:.*\n)*?" if line == "..." else _pattern(line, varies) + r"\n" for line in wanted)
    whole = _lines(printed + remarks)
    assert any(re.fullmatch(pattern, text) for text in (whole, _lines(printed))), (
        f"the page shows\n\n{chr(10).join(wanted)}\n\nand this was printed:\n\n{whole}"
    )


def _lines(text: str) -> str:
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines() if line.strip())


def _pattern(line: str, varies: bool) -> str:
    return ".*".join(_literal(part, varies) for part in line.split("..."))


def _literal(text: str, varies: bool) -> str:
    if not varies:
        return re.escape(text)
    words = (re.split(r"\s+", part) for part in _NUMBER.split(text))
    return _NUMBER.pattern.join(r"\s+".join(map(re.escape, each)) for each in words)


def _is_whole(command: str) -> bool:
    if command.endswith("\\"):
        return False
    try:
        shlex.split(command)
    except ValueError:
        return False
    return True
