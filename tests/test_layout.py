"""Imports run one way: a room imports those before it in this list and none after it.

What a room imports of another one is public: `docs/api` names it.
"""

import ast
import importlib
import re
from pathlib import Path

import pytest

import jaxgru

ROOMS = [
    "printing", "errors", "arrays", "arguments", "steps", "pytrees", "files", "records",
    "parallel", "cells", "layers", "libraries", "lm.data.tokenizers", "lm.config", "lm.data",
    "lm.model", "lm.dynamic", "lm.evaluation", "lm.processors", "lm.sampling", "lm.beam_search",
    "lm.samplers", "lm.generation", "lm.training", "lm.formats", "lm.pretrained", "lm.runs", "lm",
    "analysis", "cli", "__main__",
]  # fmt: skip
STAFF_DOORS = {
    # The conversions check what they read as `unroll` does, in the same words.
    ("jaxgru.libraries", "jaxgru.layers.validate"),
    ("jaxgru.libraries.flax_nnx", "jaxgru.layers.dropout"),
    # An ONNX graph has the operators of one step with its masks, so it takes a layer apart.
    ("jaxgru.libraries.onnx", "jaxgru.cells.layout"),
    ("jaxgru.libraries.onnx", "jaxgru.layers.over_time"),
    # The graph of a model is that of its layers, with an embedding and a head around it.
    ("jaxgru.lm.formats.onnx", "jaxgru.libraries.common"),
    ("jaxgru.lm.formats.onnx", "jaxgru.libraries.onnx"),
    ("jaxgru.lm.formats.onnx", "jaxgru.libraries.onnx_graph"),
    ("jaxgru.lm.formats.onnx", "jaxgru.libraries.onnx_nodes"),
}
"""Who imports what is not public, from which module."""
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


PATHS = {name_of(path): path for path in MODULES} | {"jaxgru": PACKAGE / "__init__.py"}
PAGES = (PACKAGE.parent / "docs" / "api").glob("*.md")
DOCUMENTED = {
    name for page in PAGES for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
}
FACES = sorted({name.rpartition(".")[0] for name in DOCUMENTED - NAMES})


def listed_names(module):
    """The names in a module's `__all__`; None: it has none."""
    for node in ast.parse(PATHS[module].read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__":
            return set(ast.literal_eval(node.value))
    return None


def public_names(module):
    """The names in a module's `__all__`, or else those that it defines without an underscore."""
    names = listed_names(module)
    if names is not None:
        return names
    body = ast.parse(PATHS[module].read_text()).body
    defined = {node.name for node in body if hasattr(node, "name")}
    targets = [node.targets[0] for node in body if isinstance(node, ast.Assign)]
    targets += [node.target for node in body if isinstance(node, ast.AnnAssign)]
    defined |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in defined if not name.startswith("_")}


def is_public(module, name):
    whole = f"{module}.{name}"
    if whole in NAMES:  # a module
        return whole in DOCUMENTED or whole in FACES
    is_face = module in DOCUMENTED or module in FACES
    return is_face and name in public_names(module)


def imports_from_other_rooms(path):
    """What a module imports, as (module, name), besides its own room and the ground floor."""
    own_room = name_of(path).split(".")[1]
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.module.startswith("jaxgru"):
            continue
        for alias in node.names:
            room = f"{node.module}.{alias.name}".split(".")[1]
            if room != own_room and not (PACKAGE / f"{room}.py").exists():
                yield node.module, alias.name


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


@pytest.mark.parametrize("face", FACES)
def test_the_reference_names_what_a_face_lists(face):
    names = listed_names(face)
    for documented in DOCUMENTED - NAMES:
        module, _, name = documented.rpartition(".")
        assert module != face or name in names, documented
    value_of = lambda module, name: getattr(importlib.import_module(module), name)
    for name in names:
        if f"{face}.{name}" in NAMES:  # a room, whose face has its own names
            continue
        by_name = [outer for outer in FACES if f"{outer}.{name}" in DOCUMENTED]
        by_module = [
            module
            for module in DOCUMENTED & NAMES
            if module.startswith(f"{face}.") and name in public_names(module)
        ]
        values = [value_of(module, name) for module in by_name + by_module]
        assert any(value is value_of(face, name) for value in values), name


def test_what_a_room_imports_of_another_is_public():
    rooms = ("lm", "libraries", "analysis", "cli")
    doors_used = set()
    internal = []
    for path in MODULES:
        importer = name_of(path)
        if importer.split(".")[1] not in rooms:
            continue
        for module, name in imports_from_other_rooms(path):
            whole = f"{module}.{name}"
            source = whole if whole in NAMES else module
            doors = {(importer, source), (importer.rpartition(".")[0], source)} & STAFF_DOORS
            doors_used |= doors
            if not is_public(module, name) and not doors:
                internal.append(f"{importer} imports {whole}")
    assert internal == []
    assert doors_used == STAFF_DOORS
