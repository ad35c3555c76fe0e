"""Fixes of upstream defects of Megatron, a module per subject.

The docstring of each module states the defect, where it is in Megatron, its symptom, the fix and
the versions of megatron-core that it applies to, if these are not all that
:mod:`mindspeed.adaptor.versions` accepts. Every module with ``PATCHES`` in these folders is found,
and says itself when it is needed:

    NEEDED_WITH = ("sft", ...)    with all of these arguments of Megatron's
    def needed(values): ...       with arguments that it looks at
    def needed_on(device, te):    on a device, or with a Transformer Engine (substitute, native)

and has those of what exists only with a Transformer Engine in ``PATCHES_OF_TRANSFORMER_ENGINE``.
One that says nothing is always needed. An argument that nobody told counts as given: a framework
sets fields of configurations, and may never tell the arguments. Fixes that act while a module is
imported have a function ``install`` instead. A fix is removed once upstream has it.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from mindspeed.adaptor.arguments import may_be_on
from mindspeed.adaptor.patch import Patch
from mindspeed.device import Device


@cache
def repair_modules() -> tuple[ModuleType, ...]:
    """All modules with ``PATCHES``, by folder and name; those that wrap the others come last."""
    names = [m.name for m in pkgutil.walk_packages(__path__, f"{__name__}.") if not m.ispkg]
    found = [module for name in names if hasattr(module := import_module(name), "PATCHES")]
    return tuple(sorted(found, key=lambda module: hasattr(module, "OUTERMOST")))


def repairs_for(device: Device, te: str) -> tuple[Patch, ...]:
    """The repairs needed on ``device``, whatever the arguments.

    Args:
        device: the device of this process.
        te: ``substitute`` or ``native`` Transformer Engine.
    """
    needed = (
        module
        for module in repair_modules()
        if not _by_arguments(module)
        and (not hasattr(module, "needed_on") or module.needed_on(device, te))
    )
    return _patches_of(needed, te)


def repairs_for_arguments(values: Mapping[str, Any], te: str) -> tuple[Patch, ...]:
    """The repairs that only some of Megatron's options need.

    Args:
        values: what is known of Megatron's arguments.
        te: ``substitute`` or ``native`` Transformer Engine.
    """
    needed = (
        module
        for module in repair_modules()
        if _by_arguments(module)
        and all(may_be_on(values, name) for name in getattr(module, "NEEDED_WITH", ()))
        and (not hasattr(module, "needed") or module.needed(values))
    )
    return _patches_of(needed, te)


def all_repairs() -> tuple[Patch, ...]:
    """Every repair of the library, for the contract check."""
    return _patches_of(repair_modules(), "substitute")


def _by_arguments(module: ModuleType) -> bool:
    return hasattr(module, "NEEDED_WITH") or hasattr(module, "needed")


def _patches_of(modules: Iterable[ModuleType], te: str) -> tuple[Patch, ...]:
    has_te = te == "substitute" or find_spec("transformer_engine") is not None
    names = ("PATCHES_OF_TRANSFORMER_ENGINE", "PATCHES") if has_te else ("PATCHES",)
    return tuple(
        patch for module in modules for name in names for patch in getattr(module, name, ())
    )
