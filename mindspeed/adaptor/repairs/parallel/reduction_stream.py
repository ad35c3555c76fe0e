"""Defect: gradients may be reduced before they are computed, on several streams.

Where: ``megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup``. With
``--num-distributed-optimizer-instances`` above 1 and ``--overlap-grad-reduce`` reductions run on a
stream that waits for the default stream, and the default stream waits for it at the end, whichever
stream computes the gradients (Megatron-LM PR 3693).
Symptom: silent, on devices with streams; a backward on another stream, as those of overlapped
expert communication, may be reduced too early.
Fix: the stream of the reduction and the current stream wait for each other.
Versions: 0.16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mindspeed.adaptor.patch import Patch

OWNER = "repair:reduction-stream"


def wait_for_gradients(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``start_grad_sync``."""

    def start_grad_sync(self: Any, *args: Any, **kwargs: Any) -> None:
        if _has_own_stream(self):
            self.communication_stream.wait_stream(torch.cuda.current_stream())
        original(self, *args, **kwargs)

    return start_grad_sync


def wait_for_reduction(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``finish_grad_sync``."""

    def finish_grad_sync(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if _has_own_stream(self):
            torch.cuda.current_stream().wait_stream(self.communication_stream)

    return finish_grad_sync


def _has_own_stream(group: Any) -> bool:
    options = group.ddp_config
    return options.overlap_grad_reduce and options.num_distributed_optimizer_instances > 1


_GROUP = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup."
PATCHES = (
    Patch(
        _GROUP + "start_grad_sync",
        wait_for_gradients,
        OWNER,
        "a reduction waits for the stream that computes gradients",
        expects="(self, force_all_reduce)",
        versions=">=0.16,<0.17",
    ),
    Patch(
        _GROUP + "finish_grad_sync",
        wait_for_reduction,
        OWNER,
        "the stream that goes on waits for the reduction",
        expects="(self, force_all_reduce)",
        versions=">=0.16,<0.17",
    ),
)
