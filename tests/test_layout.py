"""The house: imports point one way, in no circle, and what plans needs no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import torch

import ostinato

PACKAGE = Path(ostinato.__file__).parent

ROOMS = [
    "errors", "_version", "child_process", "units", "os_support", "files", "json_io", "config_fields",
    "setting_types", "other_engines", "setting_names", "config", "demo", "observe", "kv_cache", "ops", "plan",
    "formats", "layers", "models", "media", "scheduler", "sampling", "graphs", "spec_decode", "runner",
    "distributed", "engine", "replicas", "verify", "serve", "inspection", "bench", "cli", "__main__",
]  # fmt: skip
"""From the bottom up: a room imports from rooms before it alone."""


def is_module(name: str) -> bool:
    path = PACKAGE.parent / name.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def modules() -> dict[str, Path]:
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


@cache
def imports() -> dict[str, frozenset[str]]:
    """Module -> the package's modules that it imports, at its top, in functions or for types alone."""
    found: dict[str, frozenset[str]] = {}
    for name, path in modules().items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        of_one: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                of_one.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                parents = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
                base = ".".join([*parents, *([node.module] if node.module else [])])
                of_one.update(
                    f"{base}.{alias.name}" if is_module(f"{base}.{alias.name}") else base for alias in node.names
                )
        found[name] = frozenset(other for other in of_one if other.startswith("ostinato.") and is_module(other))
    return found


def room(module: str) -> str:
    return module.split(".")[1]


def test_every_folder_and_module_of_the_package_is_a_room_of_the_layout() -> None:
    assert {room(name) for name in modules() if "." in name} == set(ROOMS)


def test_imports_point_from_upper_rooms_to_lower_ones() -> None:
    upward = [
        f"{module} imports {other}"
        for module, others in imports().items()
        for other in sorted(others)
        if "." in module and ROOMS.index(room(other)) > ROOMS.index(room(module))
    ]
    assert not upward


def test_no_modules_import_each_other_in_a_circle() -> None:
    try:
        TopologicalSorter({name: others - {name} for name, others in imports().items()}).prepare()
    except CycleError as error:
        pytest.fail(f"a circle: {' -> '.join(error.args[1])}")


def test_what_plans_and_schedules_is_imported_without_torch() -> None:
    names = [
        name
        for name, path in modules().items()
        if (name.split(".")[1:2] in (["plan"], ["kv_cache"], ["scheduler"], ["replicas"]))
        or (name.startswith("ostinato.models.") and path.name == "spec.py")
        or name == "ostinato.ops.operations"
    ]
    assert "ostinato.ops.operations" in names
    code = (
        f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\nsys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_file_is_longer_than_one_can_read_at_once() -> None:
    long = {
        str(path.relative_to(PACKAGE)): count
        for path in modules().values()
        if (count := len(path.read_text().splitlines())) > 600
    }
    assert not long


def test_no_two_public_classes_have_one_name() -> None:
    """But in `models/`: an architecture's `Block` is that of its own file."""
    places: dict[str, list[str]] = {}
    for name, path in modules().items():
        if not name.startswith("ostinato.models."):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places.setdefault(node.name, []).append(name)
    assert not {name: where for name, where in places.items() if len(where) > 1}


LOOK_UPS = {"is_file", "is_dir", "exists", "is_symlink", "glob", "rglob", "expanduser", "home"}
"""Methods of `Path` that raise where a folder cannot be searched, or a home is not known."""


@pytest.mark.slow
def test_the_file_system_is_looked_up_in_one_place() -> None:
    calls = [
        f"{name}: {ast.unparse(node)}"
        for name, path in modules().items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOOK_UPS
    ]
    assert not [call for call in calls if not call.startswith(("ostinato.files: ", "ostinato.bench.gpu.parts: "))]


BUILDERS = ("layers.allocation", "layers.sketch")
"""What gives models their arrays, in `layers/` too."""

SHARED_METHODS = {"reshape", "index", "values", "norm"}
"""Methods that arrays of torch and of numpy share, and those of lists, dicts and layers named like a tensor's."""


def root(node: ast.expr) -> ast.expr:
    """What the attributes of an expression belong to: `x` of `x.a.b`."""
    return root(node.value) if isinstance(node, ast.Attribute) else node


def is_array(node: ast.expr) -> bool:
    """Whether an expression may be an array: what is computed, or a local name; no module, constant or `self`."""
    name = root(node)
    return not (isinstance(name, ast.Name) and (name.id in ("self", "build", "math") or name.id.isupper()))


def test_layers_and_models_compute_with_what_arrays_of_torch_and_numpy_share() -> None:
    """Slices, `reshape`, shapes, dtypes and operators. All else is an operation, or a method of the builder."""
    of_tensors = {name for name in dir(torch.Tensor) if not name.startswith("__")} - SHARED_METHODS
    names = {
        name: path
        for name, path in modules().items()
        if (name.startswith("ostinato.layers.") and not name.endswith(BUILDERS))
        or (name.startswith("ostinato.models.") and path.stem in ("model", "shared", "base", "decoder"))
    }
    assert {"ostinato.layers.attention", "ostinato.models.llama.model"} <= names.keys()
    misused: list[str] = []
    for name, path in names.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            func = node.func
            is_method = isinstance(func, ast.Attribute) and func.attr in of_tensors and is_array(func.value)
            if is_method or {key.arg for key in node.keywords} & {"dim", "axis"}:
                misused.append(f"{name}: {ast.unparse(node)}")
    assert not misused


def test_no_test_leaves_it_to_httpx2_how_long_it_waits() -> None:
    """Its five seconds are not enough on a busy machine."""
    waiting = {*("get", "head", "post", "put", "delete", "options", "request", "stream"), "Client", "AsyncClient"}
    found = []
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        if "httpx2." not in (text := path.read_text()):
            continue
        calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
        for call in calls:
            name, named = ast.unparse(call.func), {keyword.arg for keyword in call.keywords}
            if name.startswith("httpx2.") and name.removeprefix("httpx2.") in waiting and not named & {"timeout", None}:
                found.append(f"{path}:{call.lineno}")
    assert found == []
