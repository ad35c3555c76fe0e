"""Benchmarks and tools take names of the package that are there, also where they run weekly."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = [*sorted((ROOT / "benchmarks").glob("*.py")), *sorted((ROOT / "tools").glob("*.py"))]


def imported(source: str) -> list[tuple[str, str]]:
    """(module, name) of every import from the package, those inside functions included."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(one.name, "") for one in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found += [(node.module or "", one.name) for one in node.names]
    return [(module, name) for module, name in found if module.partition(".")[0] == "mindspeed"]


def missing(source: str) -> list[str]:
    """The names among them that cannot be imported."""
    lost = []
    for module, name in imported(source):
        try:
            found = importlib.import_module(module)
            if name and not hasattr(found, name):
                importlib.import_module(f"{module}.{name}")
        except ImportError as error:
            lost.append(f"{module}.{name}: {error}")
    return lost


def missing_of_scripts() -> dict[str, list[str]]:
    return {path.name: missing(path.read_text("utf-8")) for path in SCRIPTS}


@pytest.mark.slow
def test_names_that_benchmarks_and_tools_import_exist(ranks):
    (found,) = ranks(
        1, missing_of_scripts, setup="mindspeed.megatron_adaptor", backend=None, timeout=240
    )
    assert len(found) > 20 and not {name: lost for name, lost in found.items() if lost}


def test_a_name_that_moved_is_found():
    moved = "def f():\n    from mindspeed.errors import ConfigError, NoSuchError\n"
    assert [one.partition(":")[0] for one in missing(moved)] == ["mindspeed.errors.NoSuchError"]
