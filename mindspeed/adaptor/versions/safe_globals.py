"""Classes that ``torch.load`` accepts in checkpoints: Megatron has this list since 0.15.

Before, it reads the common state of a checkpoint with ``weights_only=False``, which runs any code.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping
from pathlib import PosixPath
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import torch

from mindspeed.adaptor.importing import PostImportHooks
from mindspeed.adaptor.versions import at_least
from mindspeed.journal import Journal

_READER = "megatron.core.dist_checkpointing.strategies.common"
_CLASSES: Mapping[str, tuple[str, ...]] = {
    "megatron.core.enums": ("ModelType",),
    "megatron.core.rerun_state_machine": ("RerunDiagnostic", "RerunMode", "RerunState"),
    "megatron.core.transformer.enums": ("AttnBackend",),
}


def install(hooks: PostImportHooks, journal: Journal) -> None:
    """Register the classes, and read with them only; nothing since 0.15."""
    if at_least("0.15"):
        return
    array = numpy.zeros(1, dtype=numpy.uint32)
    rebuild: Any = array.__reduce__()[0]
    plain = [argparse.Namespace, SimpleNamespace, PosixPath]
    torch.serialization.add_safe_globals(
        [*plain, rebuild, numpy.ndarray, numpy.dtype, type(array.dtype)]
    )
    for module, names in _CLASSES.items():
        hooks.when_imported(module, functools.partial(_register, names))
    hooks.when_imported(
        _READER, lambda module: journal.set(module, "torch", _Torch(), owner="security")
    )


def _register(names: tuple[str, ...], module: ModuleType) -> None:
    torch.serialization.add_safe_globals([getattr(module, name) for name in names])


class _Torch:
    """The module torch with ``load(weights_only=True)``."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def load(file: Any, **options: Any) -> Any:
        """``torch.load`` of plain containers, tensors and the classes above."""
        options.pop("weights_only", None)  # Megatron's is False
        return torch.load(file, weights_only=True, **options)
