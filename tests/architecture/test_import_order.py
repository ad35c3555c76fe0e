"""One direction of imports: the layers of pyproject.toml, imports inside functions included.

``lint-imports`` checks the same contract with its own reader. This test reads the source by itself,
and also sees ``import_module("mindspeed...")``.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter

import pytest

from mindspeed.original import table
from tests.architecture.source import PACKAGE, ROOT, Import, imports, imports_of, room, sources


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
    cycle: list[str] = []
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        cycle = error.args[1]
    assert not cycle, f"rooms import each other: {' -> '.join(cycle)}"


def test_the_import_paths_of_the_original_library_are_not_imported() -> None:
    """Neither are they files, nor does a module of ours import what other code does."""
    names = {name for name, row in table().items() if row.importable}
    found = [
        f"{path.relative_to(ROOT)}:{one.line} imports {one.name}"
        for path in sources()
        for one in imports_of(path)
        if any(f"{one.name}.".startswith(f"{name}.") for name in names)
    ]
    assert found == []
    places = [PACKAGE.joinpath(*name.split(".")[1:]) for name in table()]
    assert [place for place in places if place.with_suffix(".py").exists()] == []
    assert [place for place in places if (place / "__init__.py").exists()] == [
        PACKAGE / "ops/triton"  # the kernels here; the original has more of them
    ]
