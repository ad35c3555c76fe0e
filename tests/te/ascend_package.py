"""A package with the files and names of Ascend's TransformerEngineNPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mindspeed.te import SUBCLASSED, package

MODULES = {
    "": {},
    "common": {},
    "common.recipe": {"Format": ""},
    "pytorch": dict.fromkeys(SUBCLASSED, ""),
    "pytorch.optimizers": {"FusedAdam": ""},
}
"""Modules and classes of a small one; a class without a source is empty."""


def write(folder: Path, name: str, modules: Mapping[str, Mapping[str, str]] = MODULES) -> None:
    """Write it as ``folder/name``."""
    for module, classes in modules.items():
        lines = [source or f"class {one}: pass" for one, source in classes.items()]
        inside = [one.rpartition(".") for one in modules if one]
        lines += [f"from . import {child}" for parent, _, child in inside if parent == module]
        if not module:
            lines[:0] = ['"""Transformer Engine NPU - for Ascend NPUs"""', '__version__ = "2.13.0"']
        file = folder.joinpath(name, *module.split("."), "__init__.py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(lines) + "\n")


def whole() -> dict[str, dict[str, str]]:
    """All modules that Megatron imports, with the classes of this library in them."""
    found = {}
    for name, exports in package.MODULES.items():
        top, _, rest = name.partition(".")
        if top == package.TE:
            found[rest] = {
                public: f"from mindspeed.te.{file} import {own} as {public}"
                for public, (file, own) in ((p, s.split(":")) for p, s in exports.items())
            }
    return found
