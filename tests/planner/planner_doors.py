"""Which module comes first: the adaptor or Megatron; in a process where neither is."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from typing import Any

ADAPTOR = "mindspeed.megatron_adaptor"


class _Reached(Exception):
    """Megatron is looked for; the argument tells whether the adaptor is there."""


class _Watch:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Stop before Megatron; the adaptor looks for it, too."""
        if name == "megatron.core":
            raise _Reached(ADAPTOR in sys.modules)


def doors() -> dict[str, bool]:
    """For each module of the planner that imports Megatron whether the adaptor comes before."""
    import mindspeed.planner

    assert not any(name.startswith("megatron") or name == ADAPTOR for name in sys.modules)
    sys.meta_path.insert(0, _Watch())
    found = {}
    for module in pkgutil.walk_packages(mindspeed.planner.__path__, "mindspeed.planner."):
        sys.modules.pop(ADAPTOR, None)
        vars(mindspeed).pop("megatron_adaptor", None)
        try:
            importlib.import_module(module.name)
        except _Reached as reached:
            found[module.name] = reached.args[0]
    return found


def without_helpers() -> bool:
    """Import what counts a step where Megatron's compiled helpers are missing."""
    import importlib
    import sys

    sys.modules["megatron.core.datasets.helpers_cpp"] = None  # type: ignore[assignment]
    importlib.import_module("mindspeed.planner.isolated").import_ahead()
    return "mindspeed.data.megatron" in sys.modules
