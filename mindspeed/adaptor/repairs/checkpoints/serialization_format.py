"""Defect: checkpoints of 0.12 cannot be written with torch 2.8 and newer.

Where: ``megatron.core.dist_checkpointing.strategies.filesystem_async`` calls torch's
``_write_item``, which since 2.8 wants to know the format of a file.
Symptom: "_write_item() missing 1 required positional argument: 'serialization_format'" at the first
save with ``--ckpt-format torch_dist``.
Fix: the format that torch had before, and that later releases give.
Versions: <0.13.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from mindspeed.adaptor.importing import PostImportHooks
from mindspeed.adaptor.versions import at_least
from mindspeed.journal import Journal

OWNER = "format of checkpoints"
_FORMAT = "serialization_format"


def in_torchs_format(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_write_item``."""
    if _FORMAT not in inspect.signature(original).parameters:
        return original
    # Here, because it loads the whole of DTensor: nine tenths of the import line's time.
    from torch.distributed.checkpoint import filesystem

    @functools.wraps(original)
    def _write_item(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{_FORMAT: filesystem.SerializationFormat.TORCH_SAVE, **kwargs})

    return _write_item


def install(hooks: PostImportHooks, journal: Journal) -> None:
    """Replace the name in the module, when it is imported: the function itself is torch's."""

    def writers(module: ModuleType) -> None:
        if not at_least("0.13"):
            write = in_torchs_format(module._write_item)
            journal.set(module, "_write_item", write, owner=OWNER)

    hooks.when_imported("megatron.core.dist_checkpointing.strategies.filesystem_async", writers)
