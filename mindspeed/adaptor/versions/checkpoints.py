"""Megatron's checkpoints: since 0.17 the common state is written by a function, and a save in the
background is NVIDIA's resiliency package's unless Megatron's own is chosen. Since 0.19 the common
state is an object among the tensors. Since 0.15 a checkpoint says how its optimizer is sharded, in
one of the ways that came then. Since 0.15 it has a list of classes that ``torch.load`` accepts;
before, it reads the common state with ``weights_only=False``, which runs any code."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Collection, Mapping
from pathlib import PosixPath
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import torch

from mindspeed.adaptor.importing import PostImportHooks
from mindspeed.adaptor.versions import at_least
from mindspeed.journal import Journal

_CONTENTS, _KIND = "content_metadata", "distrib_optim_sharding_type"
_FULLY = "fully_sharded_model_space"  # before 0.15


def common_state_writers() -> tuple[tuple[Any, str], ...]:
    """Who holds the function that rank 0 alone writes the common state with, and its name there."""
    if at_least("0.19"):
        return ()
    if at_least("0.17"):
        from megatron.core.dist_checkpointing import serialization

        return ((serialization, "save_common"),)
    from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy

    return ((TorchCommonSaveStrategy, "save_common"),)


def reader_makers() -> tuple[str, ...]:
    """Names of what makes readers of files, in ``dist_checkpointing.strategies.torch``."""
    if at_least("0.15"):
        return ("_get_filesystem_reader",)
    return ("FileSystemReader", "CachedMetadataFileSystemReader")


def save_options(state: dict[str, Any], contents: dict[str, Any]) -> dict[str, Any]:
    """Arguments of ``dist_checkpointing.save``: Megatron's own writer plans the save.

    Args:
        state: what is saved; before 0.15 it gets the contents.
        contents: how the optimizer is sharded.
    """
    if not at_least("0.15"):
        state[_CONTENTS] = contents
        return {}
    planner = {"async_strategy": "mcore"} if at_least("0.17") else {}
    return {_CONTENTS: contents, **planner}


def contents_of(common: Mapping[str, Any]) -> dict[str, Any] | None:
    """How the optimizer of a checkpoint is sharded; None if the checkpoint does not say it.

    Args:
        common: the common state of the checkpoint.
    """
    return common.get(_CONTENTS)


def sharding(*, distributed: bool, fully: bool = False) -> dict[str, Any]:
    """How the optimizer is sharded, as Megatron names it.

    Args:
        distributed: each rank has a part of its states.
        fully: they can be loaded at other tensor and pipeline sizes; before 0.15 always.
    """
    found: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if not distributed:
        return found
    if not at_least("0.15"):
        return found | {_KIND: _FULLY}
    if not fully:
        return found | {_KIND: "dp_reshardable"}
    return found | {
        _KIND: "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
    }


def reshardable_kinds() -> Collection[str]:
    """Ways of sharding that can be loaded at other tensor and pipeline sizes."""
    if not at_least("0.15"):
        return (_FULLY,)
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    return DistributedOptimizer.checkpoint_fully_reshardable_formats  # type: ignore[no-any-return]


def reads(kind: str | None) -> bool:
    """Whether this release knows this way of sharding."""
    return at_least("0.15") or kind not in ("dp_reshardable", "fully_reshardable")


def optimizer_state(
    optimizer: Any, model: dict[str, Any], contents: Mapping[str, Any], *, is_loading: bool
) -> Any:
    """The sharded states of an optimizer.

    Args:
        optimizer: of Megatron.
        model: the sharded state dict of the model.
        contents: how they are sharded.
        is_loading: they will be loaded.
    """
    if at_least("0.15"):
        return optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=contents)
    options = {"sharding_type": contents[_KIND]} if _KIND in contents else {}
    parts = optimizer.chained_optimizers
    if len(parts) == 1:
        return optimizer.sharded_state_dict(model, is_loading, **options)
    # Without the names that tell them apart, a run whose experts are not apart reads them.
    return {
        number: part.sharded_state_dict(model, is_loading, **options)
        for number, part in enumerate(parts)
    }


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
