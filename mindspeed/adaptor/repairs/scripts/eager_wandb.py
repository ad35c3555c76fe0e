"""Defect: ``import megatron.core`` imports Weights & Biases, whether anything is recorded or not.

Where: ``megatron.core.timers`` and the contexts of inference, at module level.
Symptom: where the package is installed every process takes 0.9 s more to start, of 8 s, and leaves
two directories of temporary files behind.
Fix: before Megatron's body runs, ``wandb`` is there as a module that is loaded at its first use.
"""

from __future__ import annotations

import importlib.util
import sys
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

from mindspeed.adaptor.importing import PostImportHooks


class _LoadedAtFirstUse(ModuleType):
    """A module whose body runs when a name is asked for that its ``__spec__`` does not give.

    Unlike one of ``importlib.util.LazyLoader``, those that walk all modules, as
    ``inspect.getmodule`` does for its ``__file__``, do not load it.
    """

    def __getattr__(self, name: str) -> Any:
        spec = self.__spec__
        assert spec is not None and spec.loader is not None
        self.__class__ = ModuleType  # type: ignore[assignment]
        self.__path__ = spec.submodule_search_locations or []
        spec.loader.exec_module(self)
        return getattr(self, name)


def install(hooks: PostImportHooks) -> None:
    """Give ``wandb`` a module that is loaded at its first use, when Megatron is imported."""
    hooks.around_import("megatron.core", lambda: load_at_first_use("wandb"))


def load_at_first_use(name: str) -> AbstractContextManager[None]:
    """Put a package into ``sys.modules`` without running its body, if it is installed."""
    spec = None if name in sys.modules else importlib.util.find_spec(name)
    if spec is not None:
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        module.__class__ = _LoadedAtFirstUse
        del module.__path__  # so that the import of a submodule loads it, too
    return nullcontext()
