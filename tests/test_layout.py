"""Imports run one way: a room imports those before it in this list and none after it."""

import ast
from pathlib import Path

import pytest

import jaxgru

ROOMS = [
    "printing", "errors", "arrays", "arguments", "steps", "pytrees", "files", "records",
    "parallel", "cells", "layers", "libraries", "lm.data.tokenizers", "lm.config", "lm.data",
    "lm.model", "lm.dynamic", "lm.evaluation", "lm.processors", "lm.sampling", "lm.beam_search", "lm.samplers",
    "lm.generation", "lm.training", "lm.formats", "lm.pretrained", "lm.runs", "lm", "analysis",
    "cli", "__main__",
]  # fmt: skip
PACKAGE = Path(jaxgru.__file__).parent
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def name_of(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = set(map(name_of, MODULES))


def imports(path):
    """The modules of the package that a module imports, in functions, too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("jaxgru"):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in NAMES else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("jaxgru")}
    return found


def room_of(name):
    parts = name.split(".")[1:]
    room = ".".join(parts[: 2 if parts[0] == "lm" else 1])
    if parts[:3] == ["lm", "data", "tokenizers"]:
        return "lm.data.tokenizers"  # a config names one
    return "lm.runs" if room == "lm.load" else room  # a run may start from any model


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_imports_only_rooms_before_its_own(path):
    ours = ROOMS.index(room_of(name_of(path)))
    for name in imports(path):
        assert name != "jaxgru", "the package's face is for its users"
        assert ROOMS.index(room_of(name)) <= ours, name


def test_no_module_imports_itself_through_others():
    graph = {name_of(path): imports(path) for path in MODULES}
    done = set()

    def visit(name, chain):
        assert name not in chain, " → ".join([*chain, name])
        if name not in done:
            for other in graph.get(name, ()):
                if other != name and not name.startswith(f"{other}."):  # a package's own face
                    visit(other, [*chain, name])
            done.add(name)

    for name in graph:
        visit(name, [])


def test_the_package_knows_no_script_and_no_test():
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in filter(None, names):
                assert name.split(".")[0] not in ("scripts", "pages", "bench", "tests", "torchref")
