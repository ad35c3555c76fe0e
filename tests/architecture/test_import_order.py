"""One direction of imports: the layers of pyproject.toml, imports inside functions included.

``lint-imports`` checks the same contract with its own reader. This test reads the source by itself,
and also sees ``import_module("mindspeed...")``.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.architecture.source import PACKAGE, ROOT, Import, imports, imports_of, room, sources

IMPORT_PATHS_ONLY = {"core", "model", "utils"}  # of the original library


def layers() -> list[tuple[set[str], bool]]:
    """Rooms of each layer, top first; whether they may import each other."""
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (contract,) = (
        c for c in settings["tool"]["importlinter"]["contracts"] if c["type"] == "layers"
    )
    return [
        ({name.strip(" ()") for name in line.replace(":", "|").split("|")}, ":" in line)
        for line in contract["layers"]
    ]


def edges() -> dict[tuple[str, str], list[str]]:
    """(importing room, imported room) -> where."""
    rooms = {room(path) for path in sources()} - {"__init__"}
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path in sources():
        if path == PACKAGE / "__init__.py":  # its functions call the session and the check
            continue
        for line, name, lazy in imports_of(path):
            top, _, rest = name.partition(".")
            target = rest.partition(".")[0]
            if top == "mindspeed" and target in rooms and target != room(path):
                where = f"{path.relative_to(ROOT)}:{line} imports {name}"
                found[room(path), target].append(f"{where} (lazily)" if lazy else where)
    return found


def test_the_import_reader_finds_every_form_of_import() -> None:
    tree = ast.parse(
        "import a.b, c\n"
        "from d.e import f\n"
        "from . import g\n"
        "from ..up import x\n"
        "if TYPE_CHECKING:\n    import h\nelse:\n    import i\n"
        "class K:\n    import j\n"
        "def l():\n    import m\n    import_module(f'n.o.{p}')\n    importlib.import_module('q')\n"
    )
    assert list(imports(tree, ["top", "pkg"])) == [
        Import(1, "a.b", False),
        Import(1, "c", False),
        Import(2, "d.e.f", False),
        Import(3, "top.pkg.g", False),
        Import(4, "top.up.x", False),
        Import(8, "i", False),
        Import(10, "j", False),
        Import(12, "m", True),
        Import(13, "n.o", True),
        Import(14, "q", True),
    ]


def test_no_import_violates_the_layer_order() -> None:
    height = {name: -i for i, (names, _) in enumerate(layers()) for name in names}
    friends = [names for names, together in layers() if together]
    wrong = [
        place
        for (above, below), places in edges().items()
        if height[above] <= height[below] and not any({above, below} <= f for f in friends)
        for place in places
    ]
    assert wrong == []


def test_packages_have_no_import_cycle() -> None:
    graph = defaultdict(set)
    for above, below in edges():
        graph[above].add(below)
    for names, together in layers():  # a circle among these is still allowed
        if together:
            for name in names:
                graph[name] -= names
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"rooms import each other: {' -> '.join(error.args[1])}")


def test_the_import_paths_of_the_original_library_are_not_imported() -> None:
    inside = IMPORT_PATHS_ONLY
    assert [p for (a, b), p in edges().items() if b in inside and a not in inside] == []


def test_import_paths_of_the_original_library_only_reexport() -> None:
    """A docstring, imports, ``__all__``; a lazy ``__getattr__``; one module under a second name."""
    allowed = (ast.Import, ast.ImportFrom)
    for path in sources():
        if room(path) not in IMPORT_PATHS_ONLY:
            continue
        for node in ast.parse(path.read_text()).body:
            text = ast.unparse(node)
            fine = (
                isinstance(node, allowed)
                or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
                or text.startswith(("__all__ = ", "def __getattr__(", "sys.modules[__name__] = "))
            )
            assert fine, f"{path.relative_to(ROOT)}:{node.lineno}: {text}"
