"""Recipes that come with the package: ``mindspeed pretrain --config $(...)``.

:func:`path` finds one by name, also in an installed wheel.
"""

from __future__ import annotations

from pathlib import Path

from mindspeed.errors import ConfigError

_HERE = Path(__file__).parent


def names() -> list[str]:
    """Names of all recipes, such as ``quickstart``."""
    files = (file.relative_to(_HERE).with_suffix("") for file in _HERE.rglob("*.yaml"))
    return sorted(file.as_posix() for file in files)


def path(name: str) -> Path:
    """File of the recipe ``name``.

    Raises:
        ConfigError: There is none of that name.
    """
    if name not in names():
        raise ConfigError(f"no recipe {name!r}; there are {', '.join(names())}")
    return _HERE / f"{name}.yaml"
