"""The ways to break the cache that `tools/mutate_cache.py` tries follow the code that they break."""

from __future__ import annotations

import ast
import builtins
import runpy
from pathlib import Path
from typing import Any

import pytest

import ostinato

PACKAGE = Path(ostinato.__file__).parent
TOOL = Path(__file__).parents[2] / "tools" / "cache_mutations.py"
MUTATIONS = runpy.run_path(str(TOOL))["MUTATIONS"]


def names_in(source: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: each.what)
def test_the_text_that_a_mutation_edits_stands_once_in_its_file(mutation: Any) -> None:
    source = whole = (PACKAGE / mutation.path).read_text()
    for before, after in mutation.edits:
        assert source.count(before) == 1, before
        source = source.replace(before, after)
    assert source != whole
    assert names_in(source) <= names_in(whole) | set(dir(builtins)), "a mutant uses a name that its file does not know"


def test_the_tests_that_are_to_find_mutations_are_there() -> None:
    tree = ast.parse((TOOL.parent / "mutate_cache.py").read_text())
    [tests] = [
        each.value for each in tree.body if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "TESTS"
    ]
    names = ast.literal_eval(tests)
    assert [name for name in names if not (TOOL.parents[1] / name).is_file()] == []
    assert len(names) > 10
