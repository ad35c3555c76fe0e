"""Recipes that come with the package, by name: ``mindspeed pretrain --config llama2-7b``.

``table.yaml`` holds one entry per model and purpose, flat and with shared parts, because most
differ in a handful of values. A file next to it, such as ``quickstart.yaml``, is a complete
recipe in the form that users write. ``mindspeed recipes show NAME`` turns both into that form.
"""

from __future__ import annotations

import difflib
import functools
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspeed.errors import ConfigError
from mindspeed.parsing import read_yaml

_HERE = Path(__file__).parent
_TABLE = "table"


@functools.cache
def table() -> Mapping[str, Mapping[str, Any]]:
    """Recipes of the table: name -> flags by their names in a recipe, not in sections."""
    entries = read_yaml(_HERE / f"{_TABLE}.yaml", f"{_TABLE}.yaml")
    return {name: flags for name, flags in entries.items() if not name.startswith("_")}


def advice(name: str) -> list[str]:
    """Flags to try with a recipe of the table: the comments at the top of its entry.

    Args:
        name: Of the recipe.

    Returns:
        Lines such as ``try: --flag value   (why)``; none for most recipes.
    """
    lines = iter((_HERE / f"{_TABLE}.yaml").read_text("utf-8").splitlines())
    for line in lines:
        if line == f"{name}:":
            break
    comments = itertools.takewhile(lambda line: line.startswith("  # "), lines)
    return [line.removeprefix("  # ") for line in comments]


def files() -> Mapping[str, Path]:
    """Recipes that are files: name -> file."""
    return {file.stem: file for file in sorted(_HERE.glob("*.yaml")) if file.stem != _TABLE}


def names() -> list[str]:
    """Names of all recipes, such as ``quickstart`` and ``llama2-7b``."""
    return [*files(), *table()]


def path(name: str) -> Path:
    """File of the recipe ``name``.

    Raises:
        ConfigError: No file has that name.
    """
    if name not in files():
        raise ConfigError(f"no file holds a recipe {name!r}; there are {', '.join(files())}")
    return files()[name]


def unknown(name: str) -> str:
    """Error message for a ``name`` that is neither a recipe nor a file, with the closest names."""
    near = difflib.get_close_matches(name, names(), n=3, cutoff=0.4)
    hint = f"; closest: {', '.join(near)}" if near else ""
    return f"there is no such file and no recipe of that name{hint} (mindspeed recipes lists them)"
