"""List docstrings that break the project's rule: `docstring_rule.py [--counts] PATH...`; status 1 if there is one.

A function's docstring begins with a verb in the imperative. That of a module, class, property or attribute is a noun
phrase that names the thing. ruff's D rules check form (D205, D400, D401); this checks what they let pass.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# ruff: noqa: SIM905 - lists of words are read more easily so
FRAGMENTS = frozenset(
    "of what whether which whose who those that as where how by so if in on at to for with from since because when "
    "than see it they its their also here there this these has".split()
)
NO_VERBS = frozenset("the a an all each every any both no none not one two some another other others".split())
ENDS_IN_S = frozenset("pass process address access compress press express guess focus cross bias miss discuss".split())
PEOPLE = re.compile(r"\b(who|whoever|whom|nobody|somebody|anybody|his|him)\b", re.I)
BANNED = re.compile(
    r"\b(of which|so many|at the most|(is|are) told|lets? go of|be it|goes on|stands? in|has (it|them))\b", re.I
)


def problem(kind: str, text: str) -> str | None:
    """Return what `text` breaks as the docstring of a `kind`, or None."""
    first = re.split(r"[\s,.:;()\[\]]", text, maxsplit=1)[0].strip("`").lower()
    if first in FRAGMENTS:
        return "fragment"
    if kind == "function" and (first in NO_VERBS or text[0] in "`([-" or not first.isalpha()):
        return "no verb"
    if kind == "function" and first.endswith("s") and first not in ENDS_IN_S:
        return "not imperative"
    if PEOPLE.search(text):
        return "a thing is called a person"
    return "banned phrase" if BANNED.search(text) else None


def docstrings(tree: ast.Module) -> Iterator[tuple[str, int, str]]:
    """Yield (kind, line, text) of every docstring, those below attributes included."""
    for node in ast.walk(tree):
        body = getattr(node, "body", [])
        for before, here in zip([node, *body], body, strict=False) if isinstance(body, list) else ():
            value = getattr(here, "value", None)
            if not (isinstance(here, ast.Expr) and isinstance(value, ast.Constant) and isinstance(value.value, str)):
                continue
            kind = {ast.Module: "module", ast.ClassDef: "class"}.get(type(before))
            if isinstance(before, ast.FunctionDef | ast.AsyncFunctionDef) and before is node:
                names = {getattr(each, "id", getattr(each, "attr", "")) for each in before.decorator_list}
                kind = "property" if names & {"property", "cached_property"} else "function"
            elif isinstance(before, ast.Assign | ast.AnnAssign):
                kind = "attribute"
            if kind is not None and (before is node or kind == "attribute"):
                yield kind, here.lineno, " ".join(value.value.split())


def main(arguments: list[str]) -> int:
    """Print the breaches below the paths in `arguments`, or with `--counts` their number in each folder."""
    roots = [Path(each) for each in arguments if each != "--counts"]
    all_of, broken = Counter[str](), Counter[str]()
    for file in sorted(file for root in roots for file in ([root] if root.is_file() else root.rglob("*.py"))):
        for kind, line, text in docstrings(ast.parse(file.read_text())):
            all_of[str(file.parent)] += 1
            if text and (found := problem(kind, text)) is not None:
                broken[str(file.parent)] += 1
                if "--counts" not in arguments:
                    print(f"{file}:{line}: {found} ({kind}): {text[:100]}")
    for folder in sorted(all_of) if "--counts" in arguments else ():
        print(f"{folder:45} {broken[folder]:5} of {all_of[folder]:5}")
    print(f"{broken.total()} of {all_of.total()} docstrings break the rule", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
