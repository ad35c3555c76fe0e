"""Packages with entry points, installed as a directory that is put on ``sys.path``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mindspeed import plugins


def install(
    site: Path,
    name: str,
    modules: Mapping[str, str],
    entry_points: Mapping[str, Mapping[str, str]],
    version: str = "1.0",
) -> None:
    """What pip leaves behind of a wheel: modules, and a dist-info with METADATA.

    Args:
        site: the directory on ``sys.path``.
        name: of the distribution.
        modules: module -> its source.
        entry_points: group -> name -> ``module:attribute``.
        version: of the distribution.
    """
    site.mkdir(parents=True, exist_ok=True)
    for module, source in modules.items():
        (site / f"{module}.py").write_text(source)
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for group, entries in entry_points.items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


def forget() -> None:
    """Entry points are read again from now on."""
    from mindspeed.device import named
    from mindspeed.evaluation.task import tasks
    from mindspeed.features.registry import all_features
    from mindspeed.models.families import families
    from mindspeed.models.presets import presets

    read = plugins.all_entry_points, plugins.entry_points
    for cached in (*read, named, all_features, families, presets, tasks):
        cached.cache_clear()
