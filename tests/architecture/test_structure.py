"""No circle of imports between modules, and the counts of tools/structure.py."""

from __future__ import annotations

import sys
from functools import cache

from tests.architecture.source import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import structure


@cache
def package() -> structure.Structure:
    return structure.structure(structure.on_disk())


def test_modules_have_no_import_circle() -> None:
    """Inside of rooms, too, imports in functions and for type checkers included."""
    assert package().circles == ()


def test_every_form_of_import_is_an_edge() -> None:
    sources = {
        "p/__init__.py": "",
        "p/a.py": "import p.b\nif TYPE_CHECKING:\n    from p import c\n",
        "p/b.py": "def f():\n    from p.c import name\n",
        "p/c.py": "importlib.import_module('p.d')\n",
        "p/d.py": "import_module(f'p.a.{x}')\nimport os\nfrom p import other\n",
    }
    counted = structure.structure(sources)
    assert counted.circles == ("p.a p.b p.c p.d",)
    assert counted.files == 5
    assert counted.single_importer == ("p.a <- p.d", "p.b <- p.a", "p.d <- p.c")


def test_long_functions_and_equal_class_names_are_listed() -> None:
    long = "def f():\n" + "    x = 1\n" * structure.LONG
    counted = structure.structure({"p/a.py": f"class K: ...\n{long}", "p/b.py": "class K: ...\n"})
    assert counted.long_functions == ("p/a.py:2 f, 51 lines",)
    assert counted.classes_twice == ("K, 2 times",)
    assert (counted.lines, counted.functions) == (53, 1)


def test_flags_are_counted_where_they_are_read_and_written() -> None:
    edge = next(iter(structure.EDGES))
    sources = {
        "p/a.py": "args.x = args.y\nother.x = settings.args.z\n"
        "setattr(args, 'u', getattr(args, 't', 0))\n",
        "p/cli/b.py": "print(args.x)\n",
        edge: "args.v = args.w\n",
    }
    counted = structure.structure(sources)
    assert counted.flag_writes == ("p/a.py:1 x", "p/a.py:3 u")
    assert counted.flag_reads == ("p/a.py:1 y", "p/a.py:2 z", "p/a.py:3 t")
    assert sorted(counted.flags_at_edges) == [f"{edge}:1 v", f"{edge}:1 w"]


def test_the_namespace_of_flags_is_read_and_written_at_edges_only() -> None:
    """Others take dataclasses: of mindspeed.job, of mindspeed.flags.read, or single values."""
    assert package().flag_writes + package().flag_reads == ()
    assert modules(package().flags_at_edges) == set(structure.EDGES)


def modules(places: tuple[str, ...]) -> set[str]:
    return {place.partition(":")[0] for place in places}


def test_the_report_has_differences_and_names() -> None:
    sources = {"p/a.py": "class K: ...\n", "p/b.py": "class K: ...\n"}
    now, before = structure.structure(sources), structure.structure({"p/a.py": ""})
    text = "\n".join(structure.report(now, before, listed=True))
    assert "files                                                2        +1" in text
    assert "\n    K, 2 times" in text


def test_rooms_have_their_differences() -> None:
    now, before = {"p/a/b.py": "x\ny\n", "p/c.py": "x\n"}, {"p/a/b.py": "x\n", "p/d.py": ""}
    header, *rows = structure.report_rooms(now, before)
    assert header.split() == ["files", "lines"]
    assert [row.split() for row in rows] == [
        ["a", "1", "2", "+0", "+1"],
        ["c.py", "1", "1", "+1", "+1"],
        ["d.py", "0", "0", "-1", "+0"],
    ]
