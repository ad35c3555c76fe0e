"""Defect: the worker of asynchronous checkpoints is not ended after the process groups.

Where: ``PersistentAsyncCaller.close`` of
``megatron.core.dist_checkpointing.strategies.async_utils`` asks for the rank first, for a log
message, also when Python ends (Megatron-LM PR 3781).
Symptom: "Default process group has not been initialized" at the end of a job; a worker that still
runs is not told to end.
Fix: without process groups the worker is ended all the same, and one that does not exist is left
alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from mindspeed.adaptor.patch import repair
from mindspeed.adaptor.signatures import bind

NEEDED_WITH = ("async_save",)


def end_without_groups(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``PersistentAsyncCaller.close``."""

    def close(self: Any, *args: bool, **kwargs: bool) -> None:
        if not self.process:
            return
        if dist.is_initialized():
            original(self, *args, **kwargs)
            return
        if bind(original, (self, *args), kwargs).get("abort"):
            self.process.kill()
        else:
            self.queue.put("DONE")
            self.queue.join()
            self.process.join()
        self.process = None

    return close


PATCHES = (
    repair(
        "megatron.core.dist_checkpointing.strategies.async_utils:PersistentAsyncCaller.close",
        end_without_groups,
        "the worker of asynchronous checkpoints ends with the job",
        expects={">=0.15": "(self, abort)", "<0.15": "(self)"},
    ),
)
