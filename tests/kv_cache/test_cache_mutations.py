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
