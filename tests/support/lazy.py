"""Heavy packages are asked for when tests are collected, and imported when a test first uses them.

    needs("megatron.core", "transformers")      # skips the file where one is not installed
    hf = Lazy("transformers")                   # instead of: import transformers as hf
    resolve = Lazy("mindspeed.training.resolve", "resolve")

Every worker of pytest-xdist collects all files; Megatron, transformers, peft and lm-eval would cost
each of them ten seconds of processor time. ``tests/conftest.py`` refuses such imports.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest

HEAVY = (
    *("transformers", "peft", "lm_eval", "datasets", "accelerate", "megatron.core", "wandb"),
    *("matplotlib", "pyarrow", "pandas"),
)


def needs(*packages: str) -> None:
    """Skip the file that calls this if one of ``packages`` is not installed."""
    for package in packages:
        try:
            found = importlib.util.find_spec(package) is not None
        except ModuleNotFoundError:  # nor is its parent
            found = False
        if not found:
            pytest.skip(f"{package} is not installed", allow_module_level=True)


def needs_transformers(release: str) -> pytest.MarkDecorator:
    """A mark that skips a test whose reference is a class of a newer transformers."""
    from mindspeed.models.transformers_versions import at_least

    older = importlib.util.find_spec("transformers") is not None and not at_least(release)
    return pytest.mark.skipif(older, reason=f"compares with classes of transformers {release}")


class Lazy:
    """A module, or a function or class of it, imported when it is first used.

    It is called, or its attributes are read; where the class itself is handed on, import it.
    """

    def __init__(self, module: str, name: str | None = None) -> None:
        self._module, self._name = module, name

    def _imported(self) -> Any:
        module = importlib.import_module(self._module)
        return module if self._name is None else getattr(module, self._name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks at all names of a file for its fixtures
            raise AttributeError(name)
        return getattr(self._imported(), name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._imported()(*args, **options)
